import { html } from "./lib/preact.js";
import { Skeleton } from "./parts.js";

export const Experiment = () => html`<h1>Experiment</h1><${Skeleton} />`;
