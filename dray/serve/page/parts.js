// Small parts of all views.

import { html, useEffect, useRef, useState } from "./lib/preact.js";
import { useKeys } from "./keys.js";
import { joined, listed, useParam } from "./url.js";
import { clean, count } from "./values.js";

export { State, word } from "./states.js";

export const Crumbs = ({ places }) => html`<nav class="crumbs" aria-label="Where this is">
  ${places.map(([text, href], at) => html`${at > 0 && " / "}${href ? html`<a href=${href}>${text}</a>` : text}`)}</nav>`;

// `tabs`: [key, label, a number beside it]; `href`: the address of a key. Left and right move between them.
export function Tabs({ label, tabs, at, href }) {
  const move = event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], links = [...event.currentTarget.querySelectorAll("a")];
    const next = step && links[links.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  };
  const place = useRef(null);
  useEffect(() => { place.current.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }); }, [at]);
  return html`<nav class="tabs" ref=${place} aria-label=${label} onkeydown=${move}>${tabs.map(([key, text, badge]) => html`
    <a href=${href(key)} aria-current=${key === at ? "page" : null}>${text}${badge ? html` <span class="badge">${count(badge)}</span>` : ""}</a>`)}</nav>`;
}

export const Skeleton = ({ rows = 6 }) => html`<div class="skeleton" role="status" aria-label="Loading">
  ${Array.from({ length: rows }, (_, at) => html`<i key=${at} style=${{ width: `${92 - (at * 17) % 40}%` }} />`)}</div>`;

// A view that is loaded when it is first shown.
export function lazy(load) {
  let View = null;
  function Loaded(properties) {
    const [, again] = useState(0), [error, setError] = useState(null);
    useEffect(() => { if (!View) load().then(found => { View = found; again(1); }, setError); }, []);
    return View ? html`<${View} ...${properties} />` : html`<${Waiting} error=${error} />`;
  }
  return Object.assign(Loaded, { load: () => { load().catch(() => {}); } });
}

// While there is no answer: what is wrong, or that it is asked for.
export const Waiting = ({ error }) => error ? html`<${Trouble}>${error.message}<//>` : html`<${Skeleton} />`;
export const Trouble = ({ children }) => html`<p class="trouble">${children}</p>`;
export const Empty = ({ children }) => html`<p class="quiet empty">${children}</p>`;

// `tiles`: {value, label, more, bad}
export const Tiles = ({ tiles }) => html`<div class="tiles">${tiles.map(({ value, label, more, bad }) => html`
  <div key=${label} class=${bad ? "bad" : ""}><b>${value}</b><span>${label}</span><small>${more}</small></div>`)}</div>`;

// A table of text: its headings, then its rows.
export const Rows = ({ label, table: [heads, ...rows] }) => html`<div class="wide" tabindex="0"><table aria-label=${label}>
  <thead><tr>${heads.map((each, at) => each ? html`<th key=${at} scope="col">${clean(each)}</th>` : html`<td key=${at} />`)}</tr></thead>
  <tbody>${rows.map((row, at) => html`<tr key=${at}>${row.map((cell, place) => html`<td key=${place}>${clean(cell)}</td>`)}</tr>`)}</tbody></table></div>`;

// A command, and a button that copies it.
export function Copy({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // browsers allow it only at https or this machine
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  return html`<span class="copy"><code>${text}</code><button class="plain" onclick=${copy}>${done ? "Copied" : "Copy"}</button></span>`;
}

// ------------------------------------------------------------------ bound to parameters of the address
export function Search({ name = "search", placeholder, label = placeholder, title }) {
  const [text, set] = useParam(name), box = useRef(null);
  useKeys([["/", "search; Enter leads to what was found", () => { box.current.focus(); box.current.select(); }]]);
  return html`<input type="search" ref=${box} value=${text} placeholder=${placeholder} aria-label=${label} title=${title}
    autocomplete="off" spellcheck=${false} oninput=${event => set(event.target.value)} />`;
}

// `options`: [value, label]; the first is the one without a parameter.
export function Select({ name, label, options }) {
  const [at, set] = useParam(name, options[0]?.[0] ?? "");
  return html`<label class="inline">${label} <select value=${at} onchange=${event => set(event.target.value)}>
    ${options.map(([value, text]) => html`<option key=${value} value=${value} selected=${value === at}>${text}</option>`)}</select></label>`;
}

export function Check({ name, label }) {
  const [on, set] = useParam(name);
  return html`<label class="inline"><input type="checkbox" checked=${on === "1"} onchange=${event => set(event.target.checked ? "1" : "")} /> ${label}</label>`;
}

// Filters: `options` are [value, label, how many, explanation]; several may be on, and the parameter has them with commas.
// `onover(value)`: one is pointed at.
export function Chips({ name, label, options, onover }) {
  const [text, set] = useParam(name), on = new Set(listed(text));
  const toggle = value => {
    if (!on.delete(value)) on.add(value);
    set(joined([...on]));
  };
  return html`<span class="chips" role="group" aria-label=${label}>${options.map(([value, title, many, what]) => html`
    <button key=${value} class="chip" title=${what} aria-pressed=${on.has(value)} onclick=${() => toggle(value)} onmouseenter=${() => onover?.(value)}>${title}${many === undefined ? "" : html` <span>${count(many)}</span>`}</button>`)}</span>`;
}

// ------------------------------------------------------------------
// [ref, whether its place is on the screen or nearly].
export function useSeen() {
  const place = useRef(null), [seen, set] = useState(false);
  useEffect(() => {
    const watch = new IntersectionObserver(entries => set(entries.at(-1).isIntersecting), { rootMargin: "200px" });
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  return [place, seen];
}

export function useResize(place, act, on = []) {
  useEffect(() => {
    const watch = new ResizeObserver(act);
    watch.observe(place.current);
    return () => watch.disconnect();
  }, on);
}

export function useMedia(query) {
  const media = matchMedia(query), [is, set] = useState(media.matches);
  useEffect(() => {
    const listen = () => set(media.matches);
    media.addEventListener("change", listen);
    return () => media.removeEventListener("change", listen);
  }, []);
  return is;
}
export const useNarrow = () => useMedia("(max-width: 600px)");
