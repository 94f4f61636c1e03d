import { html } from "./lib/preact.js";
import { Skeleton } from "./parts.js";

export const Compare = () => html`<h1>Compare</h1><${Skeleton} />`;
