// A report has the answers in its file, in place of a server. It is the same page.

const element = document.getElementById("answers");

export const report = element && JSON.parse(element.textContent); // {title, written, version, answers: by path}; null for a server

// The answer to a request; undefined if the report has none.
export function answered(path, parameters) {
  const found = report.answers[path];
  return found && path.endsWith("/held_out") ? { ...found, ...chosen(found, parameters) } : found;
}

const ORDERS = { better: (a, b) => b.change - a.change, worse: (a, b) => a.change - b.change, problem: (a, b) => a.problem - b.problem };

// The held-out answers of a kind, with a text, in an order.
function chosen({ answers }, { order = "problem", kind = "", text = "", offset = 0, limit = 40 }) {
  const kinds = { better: (row) => row.change > 0, worse: (row) => row.change < 0, same: (row) => row.change === 0, truncated: (row) => row.first?.truncated || row.last?.truncated };
  const wanted = text.toLowerCase();
  const has = (row) => JSON.stringify([row.prompt, row.first?.text, row.first?.turns, row.last?.text, row.last?.turns]).toLowerCase().includes(JSON.stringify(wanted).slice(1, -1));
  const rows = answers.filter((row) => (!kind || kinds[kind](row)) && (!wanted || has(row))).sort(ORDERS[order]);
  const next = Number(offset) + limit;
  return { total: rows.length, answers: rows.slice(offset, next), next_offset: next < rows.length ? next : null };
}
