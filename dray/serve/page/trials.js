// The table of an experiment's trials: the server sorts, searches and filters; only the rows that are seen are asked for.

import { html, useRef, useState } from "./lib/preact.js";
import { Changes } from "./code.js";
import { Marks, codeName, columnsOf } from "./columns.js";
import { experiment, get, useData } from "./data.js";
import { say } from "./dialogs.js";
import { Columns } from "./menu.js";
import { Chips, Empty, Search, Skeleton, Trouble } from "./parts.js";
import { Swatch, useSelection } from "./selection.js";
import { Table } from "./table.js";
import { address, listed, setParams, useRoute } from "./url.js";
import { clean, count, plural } from "./values.js";

const PAGE = 100;  // rows of a request
const MOST_HINTED = 1500;  // letters of a diff in a tooltip
const MOST_ON_CARDS = 6;  // columns
const FACETS = ["state", "rung", "code"];
const HEIGHTS = [38, 112];

// ------------------------------------------------------------------ the table
// The rows of a search, by pages of which those on the screen are asked for: [row(i), range, the last answer].
function useRows(path, on, top) {
  const pageOf = i => Math.max(0, Math.floor(i / PAGE));
  const [pages, setPages] = useState(`${pageOf(top)} ${pageOf(top)}`), [one, two] = pages.split(" ").map(Number);
  const address = page => `${path}&offset=${page * PAGE}&limit=${PAGE}`;
  const here = useData(address(one), { on, keep: true }), next = useData(two === one ? null : address(two), { on });
  const range = useRef((first, last) => setPages(`${pageOf(first)} ${pageOf(last - 1)}`)).current;
  return [i => here.data?.trials[i - here.data.offset] ?? next.data?.trials[i - next.data.offset], range, here];
}

export function Trials({ name, about }) {
  const { params } = useRoute(), natural = about.smaller_is_better ? "best_metric" : "-best_metric", selection = useSelection(name);
  const sorted = params.get("sort") ?? natural, sort = sorted.replace(/^-/, ""), descending = sorted.startsWith("-");
  const { every, first } = columnsOf(about, name), asked = params.get("columns"), keys = asked === null ? first : listed(asked);
  const columns = every.filter(each => keys.includes(each.key));

  const filters = ["search", ...FACETS].map(each => [each, params.get(each)]).filter(([, value]) => value);
  const path = `${experiment(name)}/trials?${new URLSearchParams(filters)}`;
  const order = `&${new URLSearchParams([["sort", sort], ["descending", descending ? 1 : 0]])}`;
  const metrics = columns.filter(each => each.key.startsWith("metrics.")).map(each => `&metric=${encodeURIComponent(each.key.slice(8))}`).join("");
  const on = [about.version, about.last, about.trials].join();  // the experiment's poll says when to ask again
  const [row, range, { data, error, fresh }] = useRows(`${path}${order}${metrics}`, on, Number(params.get("row") ?? 0));
  const { data: { facets = {} } = {} } = useData(fresh ? `${path}&limit=0&facets=1` : null, { on, keep: true });  // after the rows

  // ---------------------------------------------------------------- selecting
  const anchor = useRef(null), [allOf, setAllOf] = useState(null), found = data?.found ?? 0;
  const all = selection.chosen.size === 0 ? false : allOf === path && selection.chosen.size >= found ? true : null;
  const withIds = act => get(`${path}${order}&ids=1`).then(({ ids }) => act(ids), error => say(error.message));
  const set = (trials, on) => on ? selection.add(trials) : selection.remove(trials);
  const select = (it, i, shift) => {
    const { current: from } = anchor, on = !selection.has(it.trial);
    anchor.current = i;
    if (!shift || from === null || from === i) selection.toggle(it.trial);
    else withIds(ids => set(ids.slice(Math.min(from, i), Math.max(from, i) + 1), on));
  };
  const selectAll = () => withIds(ids => {
    const on = !ids.every(selection.has);
    setAllOf(on ? path : null);
    set(ids, on);
  });

  const shownColumns = [{
    key: "trial", label: "trial", sort: true, main: true, width: "180px", cell: it => html`
      <span class="at">${selection.has(it.trial) && html`<${Swatch} name=${name} trial=${it.trial} />`}</span>${it.trial}<${Marks} it=${it} about=${about} />`,
  }, ...columns.map((each, at) => ({ ...each, wide: at >= MOST_ON_CARDS }))];
  const sortBy = key => {
    const down = key === sort ? !descending : key === "best_metric" && natural.startsWith("-"), to = `${down ? "-" : ""}${key}`;
    setParams({ sort: to === natural ? null : to });
  };
  const clear = () => setParams(Object.fromEntries(filters.map(([each]) => [each, null])));
  const [over, setOver] = useState(null), variant = code => `${experiment(name)}/variants/${encodeURIComponent(code)}`, [one, ...more] = listed(params.get("code") ?? "");
  const { data: diff } = useData(over ? variant(over) : null), hint = value => value === over && diff?.code === value ? clean(diff.diff.slice(0, MOST_HINTED)) : undefined;
  const labelled = (facet, each) => facet === "code" && each.value ? codeName(about, each.value) : each.label;
  const chips = facet => facets[facet]?.length > 1 || params.get(facet)
    ? html`<${Chips} key=${facet} name=${facet} label=${`Filter by ${facet}`} onover=${facet === "code" ? setOver : null}
      options=${(facets[facet] ?? []).map(each => [each.value, labelled(facet, each), each.count, facet === "code" && each.value ? hint(each.value) : undefined])} />` : null;
  return html`<div class="top tools">
      <${Search} placeholder="Search: adam lr<0.01 state=running" label="Search trials" title="Words, or conditions on columns: lr<0.01 state=running best<=0.3 training.loss>1" />
      <${Columns} every=${every} keys=${keys} first=${first} />
      ${data && about.trials > 0 && html`<span class="quiet" role="status">${found === data.of ? plural(found, "trial") : `${count(found)} of ${plural(data.of, "trial")}`}</span>`}
      ${filters.length > 0 && html`<button class="plain" onclick=${clear}>Show all</button>`}</div>
    <div class="facets">${FACETS.map(chips)}</div>
    ${one && !more.length && html`<${Changes} path=${variant(one)} />`}
    ${error?.status === 400 && html`<${Trouble}>${error.message}</${Trouble}>`}
    ${!data ? !error && html`<${Skeleton} rows=${12} />` : about.trials === 0 ? html`<${Empty}>No trials yet.</${Empty}>` : html`
      <${Table} label="Trials" columns=${shownColumns} count=${found} row=${row} range=${range} rowKey=${it => it.trial} href=${it => address(name, it.trial)}
        mark=${it => it.trial === about.best_trial ? "leader" : ""} selected=${it => selection.has(it.trial)} onselect=${select} all=${all} onall=${selectAll}
        sort=${sort} descending=${descending} onsort=${sortBy} heights=${HEIGHTS} order=${`${path}${order}`} busy=${!fresh} />`}`;
}
