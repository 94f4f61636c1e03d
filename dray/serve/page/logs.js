// A log: of a trial by its ranks, or an experiment's own. Lines are numbered, searched on the server, and can be linked to.

import { html, useCallback, useEffect, useRef, useState } from "./lib/preact.js";
import { Poll, experiment, get, logAddress, useData } from "./data.js";
import { useKeys } from "./keys.js";
import { TextLines, printed } from "./lines.js";
import { Copy, Empty, Search, Select, Waiting, useNarrow } from "./parts.js";
import { setParams, useParam } from "./url.js";
import { bytes, count, plural } from "./values.js";

const EVERY_MS = 1500, ENDED_MS = 15_000, TYPED_MS = 250;
const CHUNK = 500, MOST_KEPT = 50_000, MOST_MERGED = 20_000;

export function Log({ name, trial = null }) {
  const path = trial === null ? `${experiment(name)}/logs` : `${experiment(name)}/trials/${trial}/logs`;
  const [rank] = useParam("rank"), [line] = useParam("line"), [running, setRunning] = useState(true);
  // The last lines of a rank, and which ranks there are.
  const tail = `${path}?line=0&limit=${CHUNK}${rank && `&rank=${rank}`}`;
  const { data, error } = useData(tail, { every: running ? EVERY_MS : ENDED_MS });
  useEffect(() => { if (data) setRunning(data.running); }, [data]);
  const known = useRef([]);  // also while the next rank is loading
  if (data) known.current = data.ranks ?? [];
  const turn = () => {
    const every = ["", ...known.current.map(String)];
    return known.current.length > 1 && setParams({ rank: every[(every.indexOf(rank) + 1) % every.length], line: null });
  };
  useKeys([["r", "next rank", turn]]);
  if (!data) return html`<${Waiting} error=${error} />`;
  const ranks = data.ranks ?? [], all = ranks.length > 1 && !rank && !line;
  const of = trial === null ? "The experiment" : `Trial ${trial}`;
  if (!data.total && ranks.length < 2)
    return html`<${Empty}>${of} has ${trial === null ? "no events" : "printed nothing"}${data.running || trial === null ? " yet" : ""}.</${Empty}>`;
  return html`<${all ? Merged : Numbered} key=${`${path} ${all} ${rank}`} path=${path} tail=${data} ranks=${ranks}
    rank=${all || trial === null ? null : rank || String(ranks[0])}
    label=${trial === null ? `Log of ${name}` : `Output of trial ${trial}${rank && `, rank ${rank}`}`}
    whole=${trial === null ? html`<${Copy} text="dray experiment logs ${name} -f" />` : html`<a href=${logAddress(name, trial)} download="">Download all</a>`} />`;
}

// One rank's output, or an experiment's log: any line of it can be scrolled to.
function Numbered({ path, tail, ranks, rank, label, whole }) {
  const [line, setLine] = useParam("line"), [find] = useParam("find"), [follow, setFollow] = useState(!line), [, again] = useState(0);
  const kept = useRef({ lines: new Map(), asked: new Set(), total: 0, seen: 0 }).current;
  const query = rank === null ? "" : `&rank=${rank}`, target = Number(line || 0) - 1;

  const keep = found => {
    if (found.total < kept.total) kept.lines.clear();  // the file was replaced
    if (kept.lines.size > MOST_KEPT)
      for (const number of kept.lines.keys()) if (Math.abs(number - kept.seen) > MOST_KEPT / 10) kept.lines.delete(number);
    found.lines.forEach((text, at) => kept.lines.set(found.line + at, printed(text)));
    kept.total = found.total;
  };
  if (kept.tail !== tail) keep(kept.tail = tail);
  const range = useCallback((first, last) => {
    kept.seen = first;
    for (let from = first + 1; from <= last; from++) {
      if (kept.lines.has(from) || kept.asked.has(from)) continue;
      const asked = Array.from({ length: CHUNK }, (_, at) => from + at), done = () => { for (const each of asked) kept.asked.delete(each); };
      for (const each of asked) kept.asked.add(each);
      get(`${path}?line=${from}&limit=${CHUNK}${query}`).then(found => { keep(found); done(); again(it => it + 1); }, done);
    }
  }, [path, query]);
  const shown = i => {
    const text = kept.lines.get(i + 1);
    return text === undefined ? undefined : { text, number: i + 1, at: { line: String(i + 1), ...ranks.length > 1 ? { rank } : {} } };
  };
  const text = kept.lines.get(target + 1), long = useNarrow() ? 40 : 130;
  return html`<${Bar} path=${path} query=${query} tail=${tail} ranks=${ranks} rank=${rank} follow=${follow && !line} setFollow=${on => { setFollow(on); if (on) setLine(""); }} whole=${whole} />
    ${tail.total === 0 && html`<${Empty}>Rank ${rank} has printed nothing${tail.running ? " yet" : ""}.</${Empty}>`}
    <${TextLines} label=${label} total=${tail.total} line=${shown} range=${range} target=${target} find=${find}
      follow=${follow} onfollow=${setFollow} onpick=${setParams} />
    ${target >= 0 && text?.length > long && html`<pre class="whole" tabindex="0" aria-label="Line ${line}">${text}</pre>`}
    ${target >= tail.total && html`<p class="quiet">There is no line ${line} yet; there are ${count(tail.total)}.</p>`}`;
}

// The last lines of all ranks, by time.
function Merged({ path, tail, ranks, label, whole }) {
  const [find] = useParam("find"), [follow, setFollow] = useState(true), [found, set] = useState({ lines: [], skipped: 0 });
  useEffect(() => {
    let after = "";
    const poll = new Poll(async signal => {
      const news = await get(`${path}${after && `?after=${encodeURIComponent(after)}`}`, signal), first = !after;
      after = news.next;
      const lines = news.lines.map((text, at) => ({
        text: printed(text).replace(/^rank \d+ \| /, ""), number: news.places[at].join(":"), at: { rank: String(news.places[at][0]), line: String(news.places[at][1]) },
      }));
      if (lines.length) set(before => ({ lines: [...before.lines, ...lines].slice(-MOST_MERGED), skipped: first ? news.skipped : before.skipped }));
    }, EVERY_MS);
    return () => poll.stop();
  }, [path]);
  return html`<${Bar} path=${path} query="" tail=${tail} ranks=${ranks} rank="" follow=${follow} setFollow=${setFollow} whole=${whole} />
    ${found.skipped > 0 && html`<p class="quiet">The first ${bytes(found.skipped)} are left out here: choose a rank to see all of it.</p>`}
    <${TextLines} label=${label} total=${found.lines.length} line=${i => found.lines[i]} find=${find} follow=${follow} onfollow=${setFollow} onpick=${setParams} />`;
}

// ------------------------------------------------------------------ above the lines
// The lines with a text, of the whole log: found once, and then in new lines.
function useMatches(path, query, text, total, grows) {
  const [found, set] = useState({ matches: [], more: false, text: "", upto: 0 }), asking = useRef(null);
  useEffect(() => {
    const anew = found.text !== text, from = anew ? 0 : found.upto;
    if (!text) {
      if (found.text) set({ matches: [], more: false, text: "", upto: 0 });
      return undefined;
    }
    if (!anew && (total <= from || found.more || !grows)) return undefined;
    const mine = asking.current = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const answer = await get(`${path}?search=${encodeURIComponent(text)}&line=${from + 1}${query}`, mine.signal);
        set(before => ({ matches: anew ? answer.matches : [...before.matches, ...answer.matches], more: answer.more, text, upto: answer.total }));
      } catch { /* it is asked again with the next line */ }
    }, anew ? TYPED_MS : 0);
    return () => { clearTimeout(timer); mine.abort(); };
  }, [path, query, text, total]);
  return found;
}

function Bar({ path, query, tail, ranks, rank, follow, setFollow, whole }) {
  const [find] = useParam("find"), [line, setLine] = useParam("line");
  const { matches, more, text } = useMatches(path, query, find, tail.total, rank !== "");
  const at = matches.findIndex(each => String(each.line) === line && (rank === null || rank === "" || String(each.rank) === rank));
  const go = step => {
    if (!matches.length) return false;
    const now = Number(line || 0), after = matches.findIndex(each => each.line > now), next = at >= 0 ? at + step : step > 0 ? after : after - 1;
    const it = matches.at(next < 0 ? -1 : next % matches.length);
    return setParams({ line: String(it.line), rank: it.rank === null || ranks.length < 2 ? null : String(it.rank) });
  };
  useKeys([["n", "next match", () => go(1)], ["N", "previous match", () => go(-1)]]);
  const enter = event => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    go(event.shiftKey ? -1 : 1);
  };
  return html`<div class="controls logbar">
    ${ranks.length > 1 && html`<${Select} name="rank" label="rank" options=${[["", "all"], ...ranks.map(each => [String(each), String(each)])]} />`}
    <span class="find" onkeydown=${enter}><${Search} name="find" placeholder="Search the log" title="Enter: the next match; Shift+Enter: the one before" /></span>
    ${find && html`<span role="status">${text !== find ? "searching …" : matches.length ? `${at >= 0 ? `${count(at + 1)} of ` : ""}${plural(matches.length, "line")}${more ? " and more" : ""}` : "no line has it"}</span>
      <span><button class="plain" disabled=${!matches.length} aria-label="Previous match" onclick=${() => go(-1)}>‹</button> <button class="plain" disabled=${!matches.length} aria-label="Next match" onclick=${() => go(1)}>›</button></span>`}
    ${rank !== "" && html`<label class="inline">line <input class="goto" type="number" min="1" max=${tail.total} value=${line} placeholder=${tail.total} onchange=${event => setLine(event.target.value)} /> of ${count(tail.total)}</label>`}
    ${tail.running && html`<label class="inline"><input type="checkbox" checked=${follow} onchange=${event => setFollow(event.target.checked)} /> follow</label>`}
    ${whole}</div>`;
}
