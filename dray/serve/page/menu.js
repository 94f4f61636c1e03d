// Menus: of boxes, such as the columns of a table, or of verbs.

import { html, useEffect, useRef, useState } from "./lib/preact.js";
import { joined, listed, setParams, useParam } from "./url.js";

const MANY = 14;  // choices from which on one can search them

// `options`: [value, label, title]; `toggle(value)`. Escape and a press beside it close it.
export function Menu({ kind = "", title, label, options = [], on, toggle, children }) {
  const [search, setSearch] = useState(""), menu = useRef(null);
  useEffect(() => {
    const beside = event => { if (!menu.current.contains(event.target)) menu.current.open = false; };
    addEventListener("pointerdown", beside);
    return () => removeEventListener("pointerdown", beside);
  }, []);
  const escape = event => {
    if (event.key !== "Escape" || !menu.current.open) return;
    event.stopPropagation();  // else it would lead one level up
    menu.current.open = false;
    menu.current.firstElementChild.focus();
  };
  const found = options.filter(([, text]) => text.toLowerCase().includes(search.toLowerCase()));
  const done = event => { if (event.target.localName === "button") menu.current.open = false; };
  return html`<details class="menu ${kind}" ref=${menu} onkeydown=${escape}><summary>${title}</summary><div role="group" aria-label=${label} onclick=${done}>
    ${options.length > MANY && html`<input type="search" aria-label="Find" placeholder="Find" value=${search} oninput=${event => setSearch(event.target.value)} />`}
    ${found.map(([value, text, more = text]) => html`<label key=${value} title=${more}><input type="checkbox" checked=${on.includes(value)} onchange=${() => toggle(value)} /> ${text}</label>`)}
    ${children}</div></details>`;
}

// The choice of a table's columns. `every`: all of them; `keys` of those that are shown, and `first` of those that are
// shown unless others are chosen.
export function Columns({ every, keys, first }) {
  const toggle = key => {
    const chosen = every.map(each => each.key).filter(each => keys.includes(each) !== (each === key));
    setParams({ columns: `${chosen}` === `${first}` ? null : joined(chosen) || "none" });
  };
  return html`<${Menu} title="Columns" label="Columns" options=${every.map(each => [each.key, each.label, each.title])} on=${keys} toggle=${toggle}>
    ${`${keys}` !== `${first}` && html`<button class="plain" onclick=${() => setParams({ columns: null })}>Reset</button>`}<//>`;
}

// Several choices of a parameter; none: the first option.
export function Several({ name, label, options }) {
  const [text, set] = useParam(name), usual = options[0][0], chosen = listed(text), at = chosen.length ? chosen : [usual];
  const toggle = value => {
    const next = options.map(([each]) => each).filter(each => at.includes(each) !== (each === value));
    set(`${next}` === usual ? "" : joined(next));
  };
  const first = options.find(([value]) => value === at[0])?.[1] ?? at[0];
  return html`<${Menu} kind="several" label=${label} options=${options} on=${at} toggle=${toggle}
    title=${html`${label} <b>${first}${at.length > 1 && ` and ${at.length - 1} more`}</b>`} />`;
}
