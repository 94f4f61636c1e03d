// All experiments.

import { html } from "./lib/preact.js";
import { useData } from "./data.js";
import { Search, Skeleton, State } from "./parts.js";
import { Table } from "./table.js";
import { address, useParam } from "./url.js";
import { ago, count, number, plural } from "./values.js";

const EVERY_MS = 2500;
const COLUMNS = [
  { key: "name", label: "experiment", sort: true, main: true, cell: it => it.title },
  { key: "state", label: "state", sort: true, width: "140px", cell: it => html`<${State} state=${it.state} why=${it.why ?? it.reason} />` },
  { key: "trials", label: "trials", sort: true, width: "120px", align: "end", cell: it => `${count(it.ended)} / ${count(it.total)}` },
  { key: "best", label: "best", sort: true, width: "160px", align: "end", cell: it => number(it.best_metric) },
  { key: "began", label: "started", sort: true, width: "120px", cell: it => ago(it.began) },
];
const VALUES = { name: it => it.title.toLowerCase(), state: it => it.state, trials: it => it.ended, best: it => it.best_metric, began: it => it.began };

export function List() {
  const { data } = useData("/experiments", { every: EVERY_MS });
  const [search] = useParam("search"), [sort, setSort] = useParam("sort", "began"), [up, setUp] = useParam("up");
  if (!data) return html`<${Skeleton} />`;
  const words = search.toLowerCase().split(/\s+/).filter(Boolean), value = VALUES[sort] ?? VALUES.began;
  const found = data.experiments.filter(it => words.every(word => `${it.name} ${it.title} ${it.state}`.toLowerCase().includes(word)));
  found.sort((one, other) => (value(one) ?? -Infinity) < (value(other) ?? -Infinity) === Boolean(up) ? -1 : 1);
  return html`<div class="top"><h1>Experiments</h1><${Search} placeholder="Search experiments" /></div>
    <p class="quiet" role="status">${plural(found.length, "experiment")}</p>
    <${Table} label="Experiments" columns=${COLUMNS} count=${found.length} row=${i => found[i]} rowKey=${it => it.name} href=${it => address(it.name)}
      sort=${sort} descending=${!up} onsort=${key => (key === sort ? setUp(up ? "" : "1") : setSort(key))} />`;
}
