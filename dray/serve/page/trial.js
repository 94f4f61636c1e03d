import { html } from "./lib/preact.js";
import { Skeleton } from "./parts.js";

export const Trial = () => html`<h1>Trial</h1><${Skeleton} />`;
