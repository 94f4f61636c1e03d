// An address that leads nowhere.

import { html } from "./lib/preact.js";

export const NotFound = ({ what }) => html`<h1>Not found</h1><p>${what}</p><p><a href="#/">All experiments</a></p>`;
