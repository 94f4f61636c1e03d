// An experiment's config and the files of its code, as text with numbered lines; and what the code of a trial changes.

import { html, useMemo } from "./lib/preact.js";
import { codeName } from "./columns.js";
import { experiment, useData } from "./data.js";
import { Diff, TextLines } from "./lines.js";
import { Empty, Waiting } from "./parts.js";
import { address, setParams, useParam } from "./url.js";
import { bytes, clean } from "./values.js";

const CONFIG = "", CHANGES = "changes";

const EVERY_MS = 15_000;  // trials with other code may be added while it runs

export function Code({ name, about }) {
  const path = experiment(name), [file] = useParam("file"), [variant] = useParam("variant"), [show] = useParam("show");
  const of = variant ? `?variant=${encodeURIComponent(variant)}` : "";
  const { data, error } = useData(`${path}/code${of}`, { keep: true, every: about.state === "RUNNING" ? EVERY_MS : 0 });
  if (!data) return html`<${Waiting} error=${error} />`;
  const at = changes => address(name, null, "code", { ...variant && { variant }, ...changes });
  const link = (text, href, on, more) => html`<li key=${text}><a href=${href} aria-current=${on ? "page" : null}>${text}</a>${more}</li>`;
  const changed = show === CHANGES && variant;
  return html`${data.variants.length > 0 && html`<p class="controls"><label class="inline">code of <select value=${variant} onchange=${event => setParams({ variant: event.target.value, file: null, line: null, show: event.target.value ? CHANGES : null })}>
      <option value="" selected=${!variant}>the experiment</option>${data.variants.map(each => html`<option key=${each} value=${each} selected=${each === variant}>${codeName(about, each)} changed</option>`)}</select></label></p>`}
    <div class="files"><nav aria-label="Files"><ul>
      ${variant ? link("What it changes", at({ show: CHANGES }), changed) : link("experiment.yaml", at({}), file === CONFIG, html` <span class="quiet">config</span>`)}
      ${data.files.map(each => each.is_link ? html`<li key=${each.path}>${clean(each.path)} <span class="quiet">link</span></li>`
        : link(clean(each.path), at({ file: each.path }), !changed && file === each.path, html` <span class="quiet">${bytes(each.size)}</span>`))}
      ${data.more && html`<li class="quiet">and others</li>`}</ul>
      ${!data.files.length && html`<${Empty}>It has no code of its own: it was made without a model directory.</${Empty}>`}</nav>
    <div>${changed ? html`<${Changes} path=${`${path}/variants/${encodeURIComponent(variant)}`} />`
      : file === CONFIG && !variant ? html`<${Text} key="config" label="experiment.yaml" path=${`${path}/config`} of=${found => ({ text: found.config, more: 0 })} />`
        : html`<${Text} key=${file} label=${file} path=${`${path}/code/${file.split("/").map(encodeURIComponent).join("/")}${of}`} of=${found => found} />`}</div></div>`;
}

function Text({ path, label, of }) {
  const { data, error } = useData(path), [line] = useParam("line");
  const found = data && of(data), lines = useMemo(() => found?.text?.replace(/\n$/, "").split("\n").map(clean) ?? [], [data]);
  if (!data) return html`<${Waiting} error=${error} />`;
  if (found.text === null) return html`<${Empty}>${clean(label)} is binary: ${bytes(found.size)}.</${Empty}>`;
  if (!found.text) return html`<${Empty}>${clean(label)} is empty.</${Empty}>`;
  return html`<${TextLines} label=${clean(label)} total=${lines.length} target=${Number(line || 0) - 1} onpick=${setParams}
      line=${i => ({ text: lines[i], number: i + 1, at: { line: String(i + 1) } })} />
    ${found.more > 0 && html`<p class="quiet">The last ${bytes(found.more)} are left out.</p>`}`;
}

// What a variant of the code changes.
export function Changes({ path }) {
  const { data, error } = useData(path);
  if (!data) return html`<${Waiting} error=${error} />`;
  return html`<${Diff} text=${data.diff} more=${data.more} />`;
}
