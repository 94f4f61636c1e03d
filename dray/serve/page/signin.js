// What a visitor without a token sees, at the address that was asked for.

import { html } from "./lib/preact.js";

export const SignIn = () => html`<h1>Sign in</h1><p>Not signed in: open the address that dray serve has printed.</p>`;
