import { html } from "./lib/preact.js";
import { Skeleton } from "./parts.js";

export const Queue = () => html`<h1>Queue</h1><${Skeleton} />`;
