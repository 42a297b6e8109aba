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
  const send = () =>
    fetch(path, { method: "POST", headers: { "Content-Type": "application/json", Accept: accept, ...bearer() }, body: JSON.stringify(document), signal });
  let answer = await send();
  if (answer.status === 401) {
    // A browser's login dialog may read but not send; what sends shows the token itself.
    const token = window.prompt("This collector needs its token to be asked by POST:");
    if (token) {
      sessionStorage.setItem(TOKEN, token);
      answer = await send();
    }
  }
  if (answer.ok && accept !== "application/json") return answer;
  return read(answer);
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

/** Fill the fields of a form from parameters, by name. */
export function fillForm(form, parameters) {
  for (const [name, value] of Object.entries(parameters)) if (form.elements[name]) form.elements[name].value = value;
}

/** Values of a form by name, empty ones left out. */
export function values(form) {
  return Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
}
