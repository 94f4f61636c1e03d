// Conditions on trials as text, such as: lr>=0.001 lr<0.01 optimizer=adam|sgd "a name"=2. Names and values are as in
// trials.py.

const ATOM = String.raw`(?:"[^"]*"|'[^']*'|(?!')[^\s<>=!"|]+)`;
const CONDITION = new RegExp(`(${ATOM})\\s*(<=|>=|=|<|>)\\s*(${ATOM}(?:\\|${ATOM})*)`, "g");
const TESTS = {
  "<": (value, limit) => value < limit, "<=": (value, limit) => value <= limit, ">": (value, limit) => value > limit, ">=": (value, limit) => value >= limit,
  "=": (value, limit) => Math.abs(value - limit) <= 1e-4 * Math.abs(limit),  // to the digits that are shown
};
const bare = text => /^["']/.test(text) ? text.slice(1, -1) : text;
const quoted = text => new RegExp(`^${ATOM}$`).test(text) && bare(text) === text ? text : text.includes('"') && !text.includes("'") ? `'${text}'` : `"${text.replaceAll('"', "'")}"`;
const same = text => text.replaceAll('"', "'").toLowerCase();

// `dimensions`: {label, names}, names for those without numbers. Returns the conditions by label, each as {names, tests:
// [sign, limit], low, high}, and what is wrong with the text.
export function conditionsOf(text, dimensions) {
  const found = new Map(), known = new Map(dimensions.map(each => [same(each.label), each]));
  let trouble = "";
  const rest = text.replace(CONDITION, (_, name, sign, wanted) => {
    const dimension = known.get(same(bare(name))), values = wanted.match(new RegExp(ATOM, "g")).map(bare);
    if (!dimension) trouble = `There is no axis ${bare(name)}; there are ${dimensions.map(each => quoted(each.label)).join(", ")}.`;
    else if (dimension.names && sign !== "=") trouble = `${dimension.label} has no order: write ${quoted(dimension.label)}=${dimension.names.slice(0, 2).map(quoted).join("|")}.`;
    else if (dimension.names) found.set(dimension.label, { names: new Set(values.map(same)) });
    else if (values.length > 1 || Number.isNaN(Number(values[0]))) trouble = `${dimension.label} is a number: write ${quoted(dimension.label)}<0.01.`;
    else {
      const before = found.get(dimension.label) ?? { tests: [], low: -Infinity, high: Infinity }, limit = Number(values[0]);
      found.set(dimension.label, {
        tests: [...before.tests, [sign, limit]],
        low: sign[0] === "<" ? before.low : Math.max(before.low, limit), high: sign[0] === ">" ? before.high : Math.min(before.high, limit),
      });
    }
    return "";
  }).trim();
  return { conditions: found, trouble: trouble || (rest && `Can't read ${rest.slice(0, 40)}: write lr<0.01, or optimizer=adam.`) };
}

export function meets(condition, dimension, value) {
  if (value === null) return false;
  return condition.names ? condition.names.has(same(dimension.names[value])) : condition.tests.every(([sign, limit]) => TESTS[sign](value, limit));
}

// The text without conditions on a dimension, and with new ones: names, or [low, high], null where there is no limit.
export function withCondition(text, label, wanted) {
  const kept = [...text.matchAll(CONDITION)].filter(([, name]) => same(bare(name)) !== same(label)).map(([all]) => all);
  const name = quoted(label), [low, high] = wanted?.names ? [] : wanted ?? [];
  const more = wanted?.names ? [`${name}=${wanted.names.map(quoted).join("|")}`]
    : [[">=", low], ["<=", high]].filter(([, limit]) => limit !== null && limit !== undefined).map(([sign, limit]) => `${name}${sign}${Number(limit.toPrecision(3))}`);
  return [...kept, ...more].join(" ");
}
