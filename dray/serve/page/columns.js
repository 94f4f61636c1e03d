// The choice of a table's columns, in the address.

import { html, useEffect, useRef, useState } from "./lib/preact.js";
import { useKeys } from "./keys.js";
import { setParams } from "./url.js";

const MANY = 14;  // columns from which on one can search them

// `every`: all columns; `keys` of those that are shown, and `first` of those that are shown unless others are chosen.
export function Columns({ every, keys, first }) {
  const [search, setSearch] = useState(""), menu = useRef(null);
  const close = event => {
    if (!menu.current.open || menu.current.contains(event.type === "pointerdown" ? event.target : null)) return false;
    menu.current.open = false;
  };
  useKeys([["Escape", "", close]]);
  useEffect(() => {
    addEventListener("pointerdown", close);
    return () => removeEventListener("pointerdown", close);
  }, []);
  const toggle = key => {
    const on = new Set(keys.includes(key) ? keys.filter(each => each !== key) : [...keys, key]);
    const chosen = every.map(each => each.key).filter(each => on.has(each));
    setParams({ columns: `${chosen}` === `${first}` ? null : chosen.map(encodeURIComponent).join(",") || "none" });
  };
  const found = every.filter(each => each.label.toLowerCase().includes(search.toLowerCase()));
  return html`<details class="menu" ref=${menu}><summary>Columns</summary><div>
    ${every.length > MANY && html`<input type="search" aria-label="Find a column" placeholder="Find a column" value=${search} oninput=${event => setSearch(event.target.value)} />`}
    ${found.map(each => html`<label key=${each.key} title=${each.title ?? each.label}><input type="checkbox" checked=${keys.includes(each.key)} onchange=${() => toggle(each.key)} /> ${each.label}</label>`)}
    ${`${keys}` !== `${first}` && html`<button class="plain" onclick=${() => setParams({ columns: null })}>Reset</button>`}</div></details>`;
}
