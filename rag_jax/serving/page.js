// Asks the server that the page comes from. What the server sends becomes text, never HTML.

const $ = id => document.getElementById(id);
const digits = new Intl.NumberFormat("en", {style: "percent", maximumSignificantDigits: 3});
const percent = p => p > 0 && p < 1e-5 ? "<0.001%" : digits.format(p);
const sentences = new Intl.Segmenter("en", {granularity: "sentence"});
const KEPT = 100;  // answers in the history
const NO_PASSAGE = "(no passage)";  // the null document
// A digit; or a letter or mark of a script whose words stand alone, with spaces between them.
const SPACED = "(?:\\p{N}|(?![\\p{scx=Han}\\p{scx=Hira}\\p{scx=Kana}\\p{scx=Hang}\\p{scx=Thai}" +
  "\\p{scx=Laoo}\\p{scx=Khmr}\\p{scx=Mymr}])[\\p{L}\\p{M}])";
const POINT = "[.,\u066b\u066c]";  // within a number
const server = {programs: [], answers: 1, open: []};
const shown = {result: null, place: 0};  // result: null = of the question that is being asked
const earlier = [];
let running = null;  // what stops the question that is being asked
let chosen = null;  // the memory that the reader has chosen
let starting = null;  // what stops the page's beginning
let next = 0;  // the timer of the next try to begin

function make(tag, fields = {}, ...children) {
  const node = Object.assign(document.createElement(tag), fields);
  node.append(...children);
  return node;
}

const second = signal => new Promise(resolve => {
  setTimeout(resolve, 1000);
  signal.addEventListener("abort", resolve);
});
const cut = (text, most) => [...text].slice(0, most).join("");  // never within a letter

function tell(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

// --- the server ----------------------------------------------------------------------------------

async function send(path, body, signal) {
  const headers = body ? {"Content-Type": "application/json"} : {}, token = $("token").value;
  const [beyond] = token.match(/[^ -~]/u) ?? [];
  if (beyond) {  // which the server does not take, and fetch says of some that the network failed
    throw Object.assign(new Error(`The token has "${beyond}", which no token has: copy it again.`),
                        {status: 401});
  }
  if (token) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(path, {
      headers, signal, method: body ? "POST" : "GET", body: body && JSON.stringify(body)});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer: it has ended, or the network is down.");
  }
  if (response.status === 401) $("tokens").hidden = false;
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw Object.assign(new Error(
      told?.error?.message ?? `The server answered with status ${response.status}.`),
      {status: response.status, told});
  }
  return response;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {done, value} = await reader.read().catch(error => {
      if (error.name === "AbortError") throw error;
      return {done: true};
    });
    if (done) throw new Error("The answer was cut off: the server has ended, or the network.");
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      if (event === "data: [DONE]") return;
      const told = JSON.parse(event.slice("data: ".length));
      if (told.error) throw new Error(told.error.message);
      yield told;
    }
  }
}

async function answered(question, memory, signal) {
  const response = await send("v1/chat/completions", {
    model: server.model, messages: [{role: "user", content: question}], stream: true,
    n: server.answers, ...(memory && {memory})}, signal);
  const choices = [];
  let version;
  for await (const chunk of events(response.body)) {
    version = chunk.system_fingerprint;
    for (const {index, delta, finish_reason} of chunk.choices) {
      const choice = choices[index] ??= {text: ""};
      choice.text += delta.content ?? "";
      if (delta.evidence) Object.assign(choice, delta.evidence, {reason: finish_reason});
      if (index === 0 && !shown.result) $("answer").textContent = choice.text;
    }
  }
  return {question, version, choices};
}

async function retrieved(question, memory, signal) {
  const response = await send("retrieve", {question, ...(memory && {memory})}, signal);
  const {version, matched, passages} = await response.json();
  return {question, version, choices: [{matched, passages}]};
}

async function ask(question) {
  running?.abort();
  const own = running = new AbortController(), memory = chosen;
  tell("problem", "");
  clear(question);
  follow();
  try {
    const closed = await refresh(own.signal);  // another server may have been started
    if (closed) throw new Error(closed);
    const way = server.programs.includes("search") ? answered : retrieved;
    const result = await way(question, memory, own.signal);
    if (running !== own) return;
    keep(result);
    if (!shown.result) show(result);  // else an earlier one is being read
  } catch (error) {
    if (running !== own) return;
    const told = error.name === "AbortError" ? "Stopped." : error.message;
    tell("problem", shown.result ? `${cut(question, 100)}: ${told}` : told);
  }
  running = null;
  tell("state", "");
  follow();
}

// --- what is seen --------------------------------------------------------------------------------

function clear(question) {
  shown.result = null;
  tell("asked", question);
  $("result").hidden = false;
  for (const id of ["answer", "facts", "alternatives", "passages", "map"]) $(id).replaceChildren();
  for (const id of ["others", "cited", "heat"]) $(id).hidden = true;
}

function show(result, place = 0) {
  clear(result.question);
  Object.assign(shown, {result, place});
  const choice = result.choices[place];
  const traced = Boolean(choice.token_posterior?.length);
  $("answer").textContent = choice.text === undefined ? "" : choice.text || "(empty answer)";
  $("facts").textContent = facts(result, choice, traced);
  $("alternatives").append(...result.choices.map(alternative));
  $("others").hidden = result.choices.length < 2;
  $("passages").append(...ranked(choice, traced).map(
    (row, number) => card(choice, row, number + 1, traced)));
  $("cited").hidden = !choice.passages.length;
  $("heat").hidden = !traced || !choice.passages.length;
  drawMap();
  follow();
}

// What depends on whether a question is being asked, and on whether its answer is the one shown.
function follow() {
  $("answer").setAttribute("aria-busy", Boolean(running) && !shown.result);
  if (!running && document.activeElement === $("stop")) $("question").focus();
  $("stop").hidden = !running;
  earlier.forEach((result, place) => $("history").children[place].firstChild.setAttribute(
    "aria-pressed", result === shown.result));
}

function keep(result) {
  const read = () => {
    tell("problem", "");
    show(result);
  };
  earlier.unshift(result);  // the other buttons stay, and with them the focus
  $("history").prepend(make("li", {}, pressable(
    false, read, result.question, result.choices[0].text ?? "")));
  if (earlier.length > KEPT) {
    earlier.pop();
    if ($("history").lastChild.contains(document.activeElement)) $("question").focus();
    $("history").lastChild.remove();
  }
  document.querySelector("nav").hidden = false;
}

function facts(result, choice, traced) {
  const told = [];
  if (choice.text === undefined) told.push(`passages: ${choice.passages.length}`);
  if (choice.matched === false) {
    told.push("no passage has a word of this question: these are the first of the memory");
  }
  if (choice.log_prob !== undefined) {
    told.push(`p(y|x): ${percent(Math.exp(choice.log_prob))}`);
  }
  if (choice.certified) told.push("certified: no other answer that the settings allow is more probable");
  if (choice.reason === "length") told.push("cut at the length limit");
  if (!choice.passages.length) told.push("from the parameters alone, no passage was read");
  else if (choice.text !== undefined && !traced) {
    told.push("the model does not say which passage the answer came from");
  }
  if (result.version && choice.passages.length) told.push(`memory ${result.version}`);
  return told.join(" · ");
}

function pressable(pressed, act, ...texts) {
  const button = make("button", {type: "button", onclick: act},
                      ...texts.map(text => make("span", {textContent: text, dir: "auto"})));
  button.setAttribute("aria-pressed", pressed);
  return button;
}

function alternative(choice, place) {
  const press = () => {
    show(shown.result, place);
    $("alternatives").children[place].firstChild.focus();
  };
  return make("li", {}, pressable(place === shown.place, press, choice.text || "(empty answer)",
                                  percent(Math.exp(choice.log_prob))));
}

function ranked(choice, traced) {
  const by = traced ? "posterior" : "prior";
  return choice.passages.map((_, row) => row).sort(
    (a, b) => choice.passages[b][by] - choice.passages[a][by]);
}

function name(passage) {
  return passage.title || passage.source?.file || passage.id || NO_PASSAGE;
}

function place({id, source}) {
  if (!source) return id;
  const range = parts => parts.length > 1 ? `${parts[0]} to ${parts.at(-1)}` : `${parts[0]}`;
  const pages = source.pages.length && `page${source.pages.length > 1 ? "s" : ""} ${
    range(source.pages)}`;
  return [source.file, pages, source.headings.length && range(source.headings)].filter(
    Boolean).join(", ");
}

function card(choice, row, number, traced) {
  const passage = choice.passages[row];
  const shares = [["prior", passage.prior, "p(z|x), of the question alone"]];
  if (traced) shares.push(["posterior", passage.posterior, "p(z|x,y), given the answer, too"]);
  return make("li", {}, make("h4", {dir: "auto"}, `${number}. ${name(passage)}`),
              make("p", {className: "place", dir: "auto"}, place(passage)),
              ...shares.map(([label, value, title]) => make(
                "div", {className: "share", title}, make("span", {}, label),
                make("meter", {value, ariaLabel: `${label}: ${title}`}),
                make("output", {}, percent(value)))),
              make("p", {dir: "auto"}, ...marked(
                passage.text.normalize(), (choice.text ?? "").normalize())));
}

// The text, with every sentence marked that the answer stands in, not as a part of a longer word or
// number. Both are composed (NFC).
function marked(text, answer) {
  const begin = /^\s*\p{N}/u.test(answer) ? `(?<!\\p{N}${POINT})` : "";
  const end = /\p{N}\s*$/u.test(answer) ? `(?!${POINT}\\p{N})` : "";
  const words = answer.split(/\s+/u).filter(Boolean).map(
    word => word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
  const stands = new RegExp(
    `(?<!${SPACED})${begin}${words.join("\\s+")}(?!${SPACED})${end}`, "giu");
  const spans = words.length ? [...text.matchAll(stands)].map(
    found => [found.index, found.index + found[0].length]) : [];
  let at = 0;  // the first span that does not end before the sentence
  return [...sentences.segment(text)].flatMap(({segment, index}) => {
    const within = segment.trimEnd();
    while (at < spans.length && spans[at][1] <= index) at++;
    const hit = at < spans.length && spans[at][0] < index + within.length;
    return hit ? [make("mark", {}, within), segment.slice(within.length)] : [segment];
  });
}

function drawMap() {
  if (!$("heat").open || $("heat").hidden) return;
  const choice = shown.result.choices[shown.place];
  const head = make("tr", {}, make("td", {}), ...choice.tokens.map(
    token => make("th", {scope: "col"}, token.trim() || "␣")));
  const rows = ranked(choice, true).map((row, number) => make(
    "tr", {}, make("th", {scope: "row", dir: "auto"},
                   `${number + 1}. ${cut(name(choice.passages[row]), 40)}`),
    ...choice.token_posterior.map(shares => {
      const cell = make("td", {}, `${Math.round(100 * shares[row])}`);
      cell.style.setProperty("--p", shares[row]);
      return cell;
    })));
  $("map").replaceChildren(make(
    "table", {}, make("caption", {}, "How probable each passage is, at each token, in percent"),
    make("thead", {}, head), make("tbody", {}, ...rows)));
}

// --- the start -----------------------------------------------------------------------------------

// Once the server is ready: what it says of itself, `server`, and what is shown of it. Returns what
// to tell if the chosen memory is open no more, or nothing.
async function refresh(signal) {
  const said = async path => (await send(path, undefined, signal)).json();
  const compiling = async () => said("ready").then(() => null, error => {
    if (error.told?.ready !== false) throw error;
    return error.told;
  });
  for (let told; (told = await compiling()); await second(signal)) {
    tell("state", `The model is being compiled: ${told.compiled} of ${told.programs} programs.`);
  }
  tell("state", "");
  const [memory, models] = await Promise.all([said("memory"), said("v1/models")]);
  Object.assign(server, memory, {model: models.data[0].id});
  $("model").textContent = server.model;
  $("ask").textContent = server.programs.includes("search") ? "Ask" : "Find passages";
  const closed = chosen !== null && !server.open.includes(chosen) && chosen;
  if (closed) chosen = null;
  const memories = [...new Set([...server.there, ...server.open])].filter(Boolean).sort();
  $("memory").replaceChildren(...memories.map(each => make("option", {
    value: each, disabled: !server.open.includes(each), selected: each === (chosen ?? server.current)},
    server.open.includes(each) ? each : `${each} (not open)`)));
  $("memories").hidden = !memories.length;
  return closed && `The memory ${closed} is not open any more: choose another.`;
}

async function begin() {
  clearTimeout(next);
  starting?.abort();
  const own = starting = new AbortController();
  try {
    const closed = await refresh(own.signal);
    $("ask").disabled = false;
    tell("problem", closed || "");
  } catch (error) {
    if (starting !== own) return;
    tell("state", "");
    tell("problem", error.message);
    if (error.status !== 401) next = setTimeout(begin, 5000);
  }
}

$("form").onsubmit = event => {
  event.preventDefault();
  ask($("question").value.trim());
};
$("stop").onclick = () => running?.abort();
$("token").onchange = begin;
$("memory").onchange = () => { chosen = $("memory").value; };
$("heat").ontoggle = drawMap;
document.addEventListener("keydown", event => {
  if (event.key === "Escape") running?.abort();
});
begin();
