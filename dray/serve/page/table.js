// A table of which only the rows that are seen are drawn; cards where the screen is narrow.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./lib/preact.js";
import { useKeys } from "./keys.js";
import { useNarrow } from "./parts.js";
import { useParam } from "./url.js";

const AHEAD = 8;  // rows drawn beyond those that are seen

// `columns`: {key, label, cell(row), more(row): below its link, sort: is sorted by, width: CSS, align: "end", main: the card's heading}. `row(i)`: a
// row, undefined while it is loading; `range(first, last)` says which are wanted. `href(row)`: where its link goes;
// `selected(row)` and `onselect(row, i, shift)` for its box. The first row that is seen is in the address as `place`.
export function Table({ label, columns, count, row, range, rowKey, href, mark, selected, onselect, sort, descending, onsort, heights = [40, 116], place = "row" }) {
  const narrow = useNarrow(), height = heights[narrow ? 1 : 0], box = useRef(null);
  const [top, setTop] = useParam(place, "0"), [seen, setSeen] = useState([Number(top), Number(top) + 30]), [at, setAt] = useState(-1);
  const first = Math.max(0, seen[0] - AHEAD), last = Math.min(count, seen[1] + AHEAD);

  const look = () => {
    const it = box.current, from = Math.floor(it.scrollTop / height), to = from + Math.ceil(it.clientHeight / height) + 1;
    if (from !== seen[0] || to !== seen[1]) setSeen([from, to]);
    clearTimeout(box.timer);
    box.timer = setTimeout(() => box.current && setTop(String(from)), 150);
  };
  useLayoutEffect(() => {
    if (count && Math.floor(box.current.scrollTop / height) !== Number(top)) box.current.scrollTop = Number(top) * height;
    look();
  }, [count > 0, height, top]);
  useEffect(() => {
    const watch = new ResizeObserver(look);
    watch.observe(box.current);
    return () => { watch.disconnect(); clearTimeout(box.timer); };
  }, [height]);
  useEffect(() => { range?.(first, last); }, [first, last, range]);

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
  useLayoutEffect(() => {
    const line = at >= 0 && box.current.querySelector(`tr[data-at="${at}"]`);
    if (!line) return;
    (line.querySelector("a[href]") ?? line.querySelector("input")).focus({ preventScroll: true });
    setAt(-1);
  });
  const boxOf = event => document.activeElement?.closest?.("tr[data-at]")?.querySelector("input[type=checkbox]")?.dispatchEvent(
    new MouseEvent("click", { bubbles: true, cancelable: true, shiftKey: event.shiftKey }));
  useKeys([
    ["j", "next row", () => move(1)], ["k", "previous row", () => move(-1)],
    ...onselect ? [["x", "select the row; with Shift, all up to it", event => { boxOf(event); }], ["X", "", event => { boxOf(event); }]] : [],
  ]);

  const heading = each => html`<th key=${each.key} scope="col" class=${each.align === "end" ? "end" : ""}
    aria-sort=${!each.sort ? null : each.key !== sort ? "none" : descending ? "descending" : "ascending"}>
    ${each.sort ? html`<button class="sort" onclick=${() => onsort(each.key)}>${each.label}</button>` : each.label}</th>`;
  const line = i => {
    const it = row(i);
    if (it === undefined) return html`<tr key=${`? ${i}`} data-at=${i} class="row waiting" style=${{ height }}><td colspan=${columns.length + 1}><i /></td></tr>`;
    return html`<tr key=${rowKey(it)} data-at=${i} aria-rowindex=${i + 2} class="row ${mark?.(it) ?? ""}" style=${{ height }}>
      ${onselect && html`<td class="pick"><input type="checkbox" checked=${selected(it)} aria-label="select ${rowKey(it)}"
        onclick=${event => { onselect(it, i, event.shiftKey); }} /></td>`}
      ${columns.map(each => html`<td key=${each.key} class="${each.align === "end" ? "end" : ""} ${each.main ? "main" : ""}" data-label=${each.label}>
        ${each.main && href?.(it) ? html`<a class="open" href=${href(it)}>${each.cell(it)}</a>` : each.cell(it)}${each.more?.(it)}</td>`)}</tr>`;
  };
  const lines = [];
  for (let i = first; i < last; i++) lines.push(line(i));
  return html`<div class="table" ref=${box} onscroll=${look} tabindex="-1">
    <table aria-label=${label} aria-rowcount=${count + 1}>
      <colgroup>${onselect && html`<col style="width: 34px" />`}${columns.map(each => html`<col key=${each.key} style=${each.width ? { width: each.width } : {}} />`)}</colgroup>
      <thead><tr>${onselect && html`<th scope="col"><span class="hidden">selected</span></th>`}${columns.map(heading)}</tr></thead>
      <tbody>
        ${first > 0 && html`<tr key="before" aria-hidden="true" class="space" style=${{ height: first * height }} />`}
        ${lines}
        ${last < count && html`<tr key="after" aria-hidden="true" class="space" style=${{ height: (count - last) * height }} />`}
      </tbody>
    </table></div>`;
}
