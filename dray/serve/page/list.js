// All experiments: searched, filtered, sorted, and changed several at a time.

import { html, useEffect, useMemo, useRef, useState } from "./lib/preact.js";
import { useData } from "./data.js";
import { useKeys } from "./keys.js";
import { Columns } from "./menu.js";
import { learn, named } from "./names.js";
import { Check, Chips, Copy, Empty, Search, Skeleton, State, useMedia } from "./parts.js";
import { compareAddress } from "./selection.js";
import { ENDED, meaning, word } from "./states.js";
import { Table } from "./table.js";
import { address, go, joined, listed, setParams, useParam } from "./url.js";
import { ago, clock, count, duration, number, plural } from "./values.js";
import { VERBS, askTags, askVerbs } from "./verbs.js";

const EVERY_MS = 2500, SOON_MS = 700, HEIGHTS = [66, 104];
const CURVE = { width: 96, height: 30 };

// Without a number of trials, the budget is what ends a search: the share of it that is spent, else null.
const spent = it => it.max_trials === null && it.budget && !ENDED.includes(it.state) ? Math.max(...Object.values(it.budget).map(of => of.spent / of.total)) : null;
const share = it => spent(it) ?? it.ended / Math.max(it.total, 1);
const tagsOf = it => [...new Set([...it.submitted?.tags ?? [], ...it.labels])];
const methodOf = it => it.is_local ? "local run" : it.method ?? "unknown";
const beganAt = it => it.began ?? it.submitted?.submitted ?? null;
const whyOf = it => it.why ?? it.failure ?? it.reason ?? (it.submitted?.slots ? "" : it.submitted?.why ?? "");  // also why it waits
// "about 12 min": an estimate has two digits.
const rough = seconds => seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;

// The best value so far: from the first validation at the left to now at the right.
function Curve({ values, smaller }) {
  if (values.length < 2) return null;
  const low = Math.min(...values), high = Math.max(...values), { width, height } = CURVE;
  const x = at => 2 + (width - 4) * at / (values.length - 1), y = value => high > low ? height - 3 - (height - 6) * (value - low) / (high - low) : height / 2;
  const line = values.map((value, at) => `${at ? `H${x(at).toFixed(1)}V` : `M${x(0)} `}${y(value).toFixed(1)}`).join("");
  return html`<svg class="spark" width=${width} height=${height} role="img" aria-label=${`best so far, from ${number(values[0])} to ${number(values.at(-1))}; ${smaller ? "smaller" : "larger"} is better`}>
    <path d=${line} /><circle cx=${x(values.length - 1)} cy=${y(values.at(-1))} r="2.4" /></svg>`;
}

function Progress({ it }) {
  const budget = spent(it), percent = budget !== null && `${Math.round(100 * budget)}% of the budget`;
  return html`<span>${budget === null ? `${count(it.ended)} of ${count(it.total)}` : `${count(it.ended)} ended`}</span>${it.failed > 0 && html` <small class="bad">${count(it.failed)} failed</small>`}
    <progress max="1" value=${share(it)} aria-label=${percent ? `${percent} is spent` : `${it.ended} of ${it.total} trials have ended`} />${percent && html`<small>${percent}</small>`}`;
}
const slotsOf = ({ submitted }) => [submitted?.slots > 0 && `on ${plural(submitted.slots, "slot")}`, submitted?.waiting > 0 && `${plural(submitted.waiting, "trial")} waiting`].filter(Boolean).join(", ");

// `value`: what is sorted by, the largest first if `down`; `from`: how wide the screen must be, unless columns are chosen;
// `any`: what a row must have for the column to be shown.
const COLUMNS = [
  { key: "name", label: "experiment", main: true, width: "min(210px, 16vw)", value: it => it.title.toLowerCase(),
    cell: it => html`<span class="clamp" title=${it.title}>${it.title}</span>`,
    more: it => html`<small class="path" title=${it.name}>${it.number !== null && `#${it.number} `}${it.title === it.name ? "" : it.name.startsWith(`${it.title}-`) ? it.name.slice(it.title.length + 1) : it.name}${it.is_local ? html` local run, for commands only: <code>dray experiment describe ${it.path}</code>` : ""}</small>` },
  { key: "state", label: "state", value: it => word(it.state),
    cell: it => html`<${State} state=${it.state} why=${whyOf(it)} />${(slotsOf(it) || whyOf(it)) && html`<small class="clamp ${whyOf(it) && "why"}" title=${whyOf(it)}>${[slotsOf(it), named(whyOf(it))].filter(Boolean).join(" · ")}</small>`}` },
  { key: "trials", label: "trials ended", width: "144px", value: share, down: true, cell: it => html`<${Progress} it=${it} />` },
  { key: "best", label: "best", width: "132px", value: it => it.best_metric,
    cell: it => it.best_metric !== null && html`<b>${number(it.best_metric)}</b>${it.smaller_is_better !== null && html` <span class="quiet" title=${it.smaller_is_better ? "smaller is better" : "larger is better"}>${it.smaller_is_better ? "↓" : "↑"}</span>`}<small title=${it.metric}>${it.metric}</small>` },
  { key: "curve", label: "best so far", width: "112px", from: 1000, cell: it => it.curve.length > 1 && html`<${Curve} values=${it.curve} smaller=${it.smaller_is_better} />` },
  { key: "method", label: "method", width: "98px", from: 1300, value: methodOf, cell: it => html`${methodOf(it)}${it.sampler && html`<small>${it.sampler}</small>`}` },
  { key: "left", label: "time left", width: "90px", from: Infinity, value: it => it.left_s, cell: it => it.left_s !== null && html`<span title="estimated">≈ ${rough(it.left_s)}</span>` },
  { key: "ran", label: "duration", width: "120px", down: true, value: it => it.ran_s,
    cell: it => it.ran_s > 0 && html`${duration(it.ran_s)}${it.left_s !== null && html`<small title="estimated">≈ ${rough(it.left_s)} left</small>`}` },
  { key: "slots", label: "slots", width: "80px", down: true, from: Infinity, value: it => it.submitted?.slots ?? -1, cell: it => it.submitted?.slots > 0 && number(it.submitted.slots) },
  { key: "tags", label: "tags", width: "122px", any: it => tagsOf(it).length > 0, from: 1300, value: it => tagsOf(it).join() || null,
    cell: it => tagsOf(it).length > 0 && html`<span class="clamp" title=${tagsOf(it).join(", ")}>${tagsOf(it).map(tag => html`<span key=${tag} class="tag">${tag}</span>`)}</span>` },
  { key: "owner", label: "owner", width: "100px", from: 1470, any: it => it.submitted?.owner, value: it => it.submitted?.owner || null, cell: it => it.submitted?.owner },
  { key: "budget", label: "budget", width: "150px", from: Infinity, value: it => it.usage && share(it), down: true, cell: it => it.usage },
  { key: "began", label: "started", width: "108px", from: 1000, down: true, value: beganAt, cell: it => html`<span title=${clock(beganAt(it))}>${ago(beganAt(it))}</span>` },
];
const FILTERS = [
  { name: "state", of: it => [it.state], label: word, title: meaning }, { name: "method", of: it => [methodOf(it)] },
  { name: "tag", of: tagsOf }, { name: "owner", of: it => it.submitted ? [it.submitted.owner || "operator"] : [] },
];
const MOST_CHIPS = 14;

function sorted(found, key, up) {
  const { value } = COLUMNS.find(each => each.key === key && each.value) ?? COLUMNS.at(-1), sign = up ? 1 : -1;
  const keyed = found.map(it => [value(it), it]), missing = of => of === null || of === undefined;
  keyed.sort(([one], [other]) => missing(one) - missing(other) || sign * (one < other ? -1 : one > other ? 1 : 0));
  return keyed.map(([, it]) => it);
}

const texts = new WeakMap();
function textOf(it) {
  if (!texts.has(it)) texts.set(it, words(it));
  return texts.get(it);
}
const words = it => [it.number, it.name, it.title, word(it.state), it.state, it.metric, methodOf(it), it.sampler, it.submitted?.owner, whyOf(it), ...tagsOf(it)].join(" ").toLowerCase();

// The rows that match, and for each filter its values with how many rows each would give.
function useFound(all, search) {
  const chosen = FILTERS.map(({ name }) => useParam(name)[0]);
  return useMemo(() => {
    const searched = search.toLowerCase().split(/\s+/).filter(Boolean), sets = chosen.map(text => new Set(listed(text)));
    const wanted = all.filter(it => searched.every(each => textOf(it).includes(each)));
    const fits = FILTERS.map(({ of }, at) => wanted.map(it => sets[at].size === 0 || of(it).some(value => sets[at].has(value))));
    const chips = FILTERS.map(({ of, label = it => it, title = () => "" }, at) => {
      const many = new Map([...sets[at]].map(value => [value, 0]));
      wanted.forEach((it, i) => {
        if (fits.every((each, other) => other === at || each[i])) for (const value of of(it)) many.set(value, (many.get(value) ?? 0) + 1);
      });
      const options = [...many].map(([value, number]) => [value, label(value), number, title(value)]).sort((one, other) => other[2] - one[2] || (one[1] < other[1] ? -1 : 1));
      return options.filter(([value], place) => place < MOST_CHIPS || sets[at].has(value));
    });
    return { chips, found: wanted.filter((_, i) => fits.every(each => each[i])), filtered: searched.length > 0 || sets.some(set => set.size > 0) };
  }, [all, search, ...chosen]);
}

// What can be done with the selected experiments.
function Selected({ rows, me, clear }) {
  const best = rows.filter(it => it.best_trial !== null && !it.is_local);
  const compare = () => best.length > 0 && go(compareAddress(best.map(it => [it.name, it.best_trial])));
  useKeys([["c", "compare the best trials of the selected experiments", () => rows.length > 0 && compare()]]);
  if (!rows.length) return null;
  return html`<div class="bulk" role="group" aria-label="Selected experiments"><b>${count(rows.length)} selected</b>
    ${["stop", "pause", "activate"].map(verb => html`<button key=${verb} class=${VERBS[verb][1] ? "danger" : ""} onclick=${() => askVerbs(rows, verb, me)}>${VERBS[verb][0]}</button>`)}
    <button onclick=${() => askTags(rows, me)}>Tag</button>
    <button onclick=${compare} disabled=${best.length === 0}>Compare best trials</button>
    <button class="danger" onclick=${() => askVerbs(rows, "delete", me, clear)}>Delete</button>
    <button class="plain" onclick=${clear}>Clear</button></div>`;
}

export function List() {
  const [soon, setSoon] = useState(true), { data } = useData("/experiments", { every: soon ? SOON_MS : EVERY_MS }), { data: me } = useData("/token");
  const [search] = useParam("search"), [sort] = useParam("sort", "began"), [order] = useParam("order"), [text] = useParam("columns");
  const [picked, setPicked] = useParam("sel"), last = useRef(null);
  const medium = useMedia("(min-width: 1000px)"), large = useMedia("(min-width: 1300px)"), huge = useMedia("(min-width: 1470px)");
  const [local] = useParam("local"), every = data?.experiments, locals = every?.filter(it => it.is_local).length ?? 0;
  const all = useMemo(() => (every ?? []).filter(it => local === "1" || !it.is_local), [every, local]), { chips, found, filtered } = useFound(all, search);
  const natural = COLUMNS.find(each => each.key === sort)?.down ? "down" : "up", up = (order || natural) === "up";
  const rows = useMemo(() => sorted(found, sort, up), [found, sort, up]);
  useMemo(() => learn(every ?? []), [every]);
  useEffect(() => { document.title = "Experiments · dray"; }, []);
  useEffect(() => setSoon(!data || data.unread > 0), [data]);
  if (!data) return html`<h1>Experiments</h1><${Skeleton} rows=${10} />`;

  const room = huge ? 1470 : large ? 1300 : medium ? 1000 : 0;
  const usual = COLUMNS.slice(1).filter(each => (each.from ?? 0) <= room && (!each.any || all.some(each.any))).map(each => each.key), shown = text ? listed(text) : usual;
  const columns = COLUMNS.filter(each => each.main || shown.includes(each.key)).map(each => ({ ...each, sort: Boolean(each.value) }));
  const selected = new Set(listed(picked)), names = new Set(all.map(it => it.name));
  const select = values => setPicked(joined([...values].filter(name => names.has(name))));
  const toggle = (it, at, shift) => {
    const on = !selected.has(it.name), from = shift && last.current !== null ? last.current : at;
    for (const each of rows.slice(Math.min(from, at), Math.max(from, at) + 1)) selected[on ? "add" : "delete"](each.name);
    last.current = at;
    select(selected);
  };
  const byKey = key => setParams(key === sort ? { order: order ? null : up ? "down" : "up" } : { sort: key === "began" ? null : key, order: null });
  return html`<div class="top"><h1>Experiments</h1><${Search} placeholder="Search experiments" title="Words in the name, state, method, tags, owner or error" /></div>
    ${all.length > 0 && html`<div class="filters">${FILTERS.map(({ name }, at) => (chips[at].length > 1 || filtered) && chips[at].length > 0 && html`
      <span key=${name}><span class="quiet">${name}</span> <${Chips} name=${name} label="Filter by ${name}" options=${chips[at]} /></span>`)}</div>`}
    <div class="status"><p class="quiet" role="status">${found.length === all.length ? plural(all.length, "experiment") : `${count(found.length)} of ${plural(all.length, "experiment")}`}
        ${data.unread > 0 && `, ${count(data.unread)} still to be read`}</p>
      ${locals > 0 && html`<${Check} name="local" label=${`with ${plural(locals, "local run")}`} />`}
      ${filtered && html`<button class="plain" onclick=${() => setParams({ search: null, state: null, method: null, tag: null, owner: null })}>Clear filters</button>`}
      ${rows.length > 0 && html`<button class="plain" onclick=${() => select([...selected, ...rows.map(it => it.name)])}>Select all ${count(rows.length)}</button>`}<${Columns} every=${COLUMNS.slice(1)} keys=${shown} first=${usual} /></div>
    <${Selected} rows=${all.filter(it => selected.has(it.name))} me=${me} clear=${() => setPicked("")} />
    ${all.length === 0 ? html`<${Empty}>No experiments yet. <${Copy} text="dray experiment create CONFIG MODEL_DIR" /></${Empty}>`
      : html`<${Table} label="Experiments" columns=${columns} count=${rows.length} row=${i => rows[i]} rowKey=${it => it.name} heights=${HEIGHTS} mark=${it => selected.has(it.name) ? "chosen" : ""}
          href=${it => it.is_local ? null : address(it.name)} selected=${it => selected.has(it.name)} onselect=${toggle} sort=${sort} descending=${!up} onsort=${byKey} />`}`;
}
