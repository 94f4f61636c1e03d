// What experiments are called beside others: "#4 digits-asha".

import { useMemo } from "./lib/preact.js";
import { useData } from "./data.js";

let labels = new Map();

export function learn(experiments) {  // without a number, a title may be that of several
  labels = new Map(experiments.filter(it => it.number !== null).map(it => [it.name, `#${it.number} ${it.title}`]));
}

export const label = name => labels.get(name) ?? name;
// A text with labels in place of the names.
export const named = text => text.replace(/[\w.-]+/g, label);

// Has labels for these experiments.
export function useLabels(names) {
  const { data } = useData(names.length ? "/experiments" : null, { on: [...new Set(names)].sort().join(), keep: true });
  useMemo(() => { if (data) learn(data.experiments); }, [data]);
}
