/* The collector's API: JSON, or an error that says what the collector said. */

const TOKEN = "kvscope-token";

/** GET a document. Parameters that are null or empty are left out. */
export async function get(path, parameters = {}, signal = undefined) {
  const known = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(known).toString();
  return read(await fetch(query ? `${path}?${query}` : path, { headers: { Accept: "application/json", ...bearer() }, signal }));
}

/** POST a document; accept is the media type of the answer. Answers of other types than JSON are the Response itself. */
export async function post(path, document, { accept = "application/json", signal = undefined } = {}) {
  const answer = await change(path, { method: "POST", headers: { "Content-Type": "application/json", Accept: accept }, body: JSON.stringify(document), signal });
  if (answer.ok && accept !== "application/json") return answer;
  return read(answer);
}

/** DELETE a thing. */
export const remove = async (path) => read(await change(path, { method: "DELETE", headers: { Accept: "application/json" } }));

/** Send what a browser's login dialog may not: where the token is asked for, it is asked for here, once. */
async function change(path, request) {
  const send = () => fetch(path, { ...request, headers: { ...request.headers, ...bearer() } });
  const answer = await send();
  if (answer.status !== 401) return answer;
  const token = window.prompt("This collector needs its token to be told to change or to ask something:");
  if (!token) return answer;
  sessionStorage.setItem(TOKEN, token);
  return send();
}

function bearer() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function read(answer) {
  const text = await answer.text();
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    throw new Error(answer.ok ? "the collector's answer is no JSON" : `the collector answered ${answer.status} ${answer.statusText}`);
  }
  if (!answer.ok) throw new Error(document.detail || document.title || `the collector answered ${answer.status}`);
  return document;
}

/** Parameters of the page's own address; `set` keeps them there, so that a page can be sent to somebody. */
export const address = {
  all: () => Object.fromEntries(new URLSearchParams(location.search)),
  set(parameters) {
    const known = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const query = new URLSearchParams(known).toString();
    history.replaceState(null, "", query ? `?${query}` : location.pathname);
  },
};

/** Fill the fields of a form from parameters, by name; a choice that a list does not offer becomes one of it. */
export function fillForm(form, parameters) {
  for (const [name, value] of Object.entries(parameters)) {
    const field = form.elements.namedItem(name);
    if (!field) continue;
    field.value = value;
    if (field.tagName === "SELECT" && field.value !== value) field.add(new Option(value, value, true, true));
  }
}

/** Values of a form by name, empty ones left out. */
export function values(form) {
  return Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
}
