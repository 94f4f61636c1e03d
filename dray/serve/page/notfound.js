// An address that leads nowhere, and what it asked for.

import { html, useEffect } from "./lib/preact.js";
import { address } from "./url.js";

// `what`: a sentence, or the address; `name`: an experiment that exists.
export function NotFound({ what, name }) {
  useEffect(() => { document.title = "Not found · dray"; }, []);
  return html`<h1>Not found</h1><p class="trouble">${what.startsWith("#") ? html`The page has no view <code>${what}</code>.` : what}</p>
    <p>${name && html`<a href=${address(name)}>${name}</a> · `}<a href="#/">All experiments</a></p>`;
}
