// A table of which only the rows that are seen are drawn; cards where the screen is narrow.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./lib/preact.js";
import { useKeys } from "./keys.js";
import { useNarrow, useResize } from "./parts.js";
import { useParam } from "./url.js";

const AHEAD = 8;  // rows drawn beyond those that are seen
const WIDTH = 150;  // of a column, where none is given

// `columns`: {key, label, title, cell(row), more(row): below its link, sort: is sorted by, width: CSS, align: "end",
// main: the card's heading, wide: not on cards}. `row(i)`: a row, undefined while it is loading; `range(first, last)` says which are wanted. `href(row)`:
// where its link goes; `selected(row)` and `onselect(row, i, shift)` for its box; `all` (true, false, or null for some)
// and `onall()` for the box of all. The first row that is seen is in the address as `row`; another `order` begins anew;
// while it is `busy`, the rows are those of the order before.
export function Table({ label, columns: given, count, row, range, rowKey, href, mark, selected, onselect, all, onall, sort, descending, onsort, heights = [40, 116], order = "", busy = false }) {
  const narrow = useNarrow(), height = heights[narrow ? 1 : 0], box = useRef(null), columns = narrow ? given.filter(each => !each.wide) : given;
  const [top, setTop] = useParam("row", "0"), [seen, setSeen] = useState([Number(top), Number(top) + 30]), [at, setAt] = useState(-1);
  const first = Math.max(0, Math.min(seen[0] - AHEAD, count - 1)), last = Math.min(count, seen[1] + AHEAD);
  const told = useRef(""), ordered = useRef(order);
  // The row with the focus: if the rows are drawn in another order, it must keep it.
  const held = box.current?.contains(document.activeElement) ? document.activeElement.closest("tr[data-key]")?.dataset.key : undefined;

  const look = () => {
    const it = box.current, from = Math.floor(it.scrollTop / height), to = from + Math.ceil(it.clientHeight / height) + 1;
    if (from !== seen[0] || to !== seen[1]) setSeen([from, to]);
    clearTimeout(box.timer);
    box.timer = setTimeout(() => {
      if (!box.current) return;
      told.current = String(from);
      setTop(told.current);
    }, 150);
  };
  useLayoutEffect(() => {
    if (ordered.current !== order) {
      ordered.current = order;
      box.current.scrollTop = 0;
    } else if (count && top !== told.current) box.current.scrollTop = Number(top) * height;
    if (count) told.current = top;
    look();
  }, [count > 0, height, top, order]);
  useResize(box, look, [height]);
  useEffect(() => () => clearTimeout(box.timer), [height]);
  useEffect(() => { range?.(first, last); }, [first, last, range]);
  // It ends where the screen ends.
  useLayoutEffect(() => box.current.style.setProperty("--top", `${Math.round(box.current.getBoundingClientRect().top + scrollY)}px`));

  const move = step => {
    if (!count) return false;
    const line = document.activeElement?.closest?.("tr[data-at]"), from = box.current.contains(line) ? Number(line.dataset.at) : null;
    const next = from === null ? Math.min(seen[0], count - 1) : Math.min(Math.max(from + step, 0), count - 1);
    const y = next * height, it = box.current;
    if (y < it.scrollTop) it.scrollTop = y;
    else if (y + height > it.scrollTop + it.clientHeight - 40) it.scrollTop = y + height - it.clientHeight + 40;
    setAt(next);
    look();
  };
  const focus = line => (line.querySelector("a[href]") ?? line.querySelector("input"))?.focus({ preventScroll: true });
  useLayoutEffect(() => {
    const line = at >= 0 && box.current.querySelector(`tr[data-at="${at}"]`);
    if (line) {
      focus(line);
      setAt(-1);
    } else if (held !== undefined && document.activeElement === document.body) {
      const moved = box.current.querySelector(`tr[data-key="${CSS.escape(held)}"]`);
      if (moved) focus(moved);
    }
  });
  const boxOf = event => document.activeElement?.closest?.("tr[data-at]")?.querySelector("input[type=checkbox]")?.dispatchEvent(
    new MouseEvent("click", { bubbles: true, cancelable: true, shiftKey: event.shiftKey }));
  useKeys([
    ["j", "next row", () => move(1)], ["k", "previous row", () => move(-1)],
    ...onselect ? [["x", "select the row; with Shift, all up to it", event => { boxOf(event); }], ["X", "", event => { boxOf(event); }]] : [],
  ]);

  const kind = each => `${each.align === "end" ? "end" : ""} ${each.main ? "main" : ""}`;
  const heading = each => html`<th key=${each.key} scope="col" class=${kind(each)} title=${each.title ?? each.label}
    aria-sort=${!each.sort ? null : each.key !== sort ? "none" : descending ? "descending" : "ascending"}>
    ${each.sort ? html`<button class="sort" onclick=${() => onsort(each.key)}>${each.label}</button>` : each.label}</th>`;
  const line = i => {
    const it = row(i);
    if (it === undefined) return html`<tr key=${`? ${i}`} data-at=${i} class="row waiting" style=${{ height }}><td colspan=${columns.length + 1}><i /></td></tr>`;
    return html`<tr key=${rowKey(it)} data-key=${rowKey(it)} data-at=${i} aria-rowindex=${i + 2} class="row ${mark?.(it) ?? ""}" style=${{ height }}>
      ${onselect && html`<td class="pick"><input type="checkbox" checked=${selected(it)} aria-label="select ${rowKey(it)}"
        onclick=${event => { onselect(it, i, event.shiftKey); }} /></td>`}
      ${columns.map(each => html`<td key=${each.key} class=${kind(each)} data-label=${each.label}>
        ${each.main && href?.(it) ? html`<a class="open" href=${href(it)}>${each.cell(it)}</a>` : each.cell(it)}${each.more?.(it)}</td>`)}</tr>`;
  };
  const lines = [];
  for (let i = first; i < last; i++) lines.push(line(i));
  const width = columns.reduce((sum, each) => sum + (parseInt(each.width, 10) || WIDTH), onselect ? 34 : 0);
  return html`<div class="table ${onselect ? "picks" : ""}" ref=${box} onscroll=${look} tabindex="-1">
    <table aria-label=${label} aria-rowcount=${count + 1} aria-busy=${busy} style=${narrow ? {} : { minWidth: `${width}px` }}>
      <colgroup>${onselect && html`<col style="width: 34px" />`}${columns.map(each => html`<col key=${each.key} style=${each.width ? { width: each.width } : {}} />`)}</colgroup>
      <thead><tr>${onselect && html`<th scope="col" class="pick">${onall ? html`<input type="checkbox" aria-label="select all rows" title="Select all rows, also those that are not on the screen"
        checked=${all === true} indeterminate=${all === null} onclick=${() => { onall(); }} />` : html`<span class="hidden">selected</span>`}</th>`}${columns.map(heading)}</tr></thead>
      <tbody>
        ${first > 0 && html`<tr key="before" aria-hidden="true" class="space" style=${{ height: first * height }} />`}
        ${lines}
        ${last < count && html`<tr key="after" aria-hidden="true" class="space" style=${{ height: (count - last) * height }} />`}
      </tbody>
    </table></div>`;
}
