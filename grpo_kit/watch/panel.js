// The buttons of panel.py, which fills in the two words in capital letters.
(() => {
  const [name, folders, kernel, run, values] = ARGUMENTS;
  const data = document.getElementById("jupyter-config-data");
  if (!data) return;
  const page = JSON.parse(data.textContent);
  const root = (page.serverRoot || "").replace(/\\/g, "/").replace(/\/+$/, "");
  const folder = folders.find(path => page.serverRoot && path.startsWith(root + "/"));
  const at = folder && folder.slice(root.length + 1).split("/").map(encodeURIComponent).join("/");
  const tell = text => document.querySelectorAll(`[data-kit-status="${name}"]`).forEach(e => e.textContent = text);
  const server = (path, options) => {
    const headers = {"Content-Type": "application/json"};
    const xsrf = document.cookie.match(/(?:^|; )_xsrf=([^;]*)/);
    if (xsrf) headers["X-XSRFToken"] = xsrf[1];
    if (page.token) headers.Authorization = `token ${page.token}`;
    return fetch(`${page.baseUrl}api/${path}`, {credentials: "same-origin", headers, ...options});
  };
  const all = kind => document.querySelectorAll(`[data-kit-${kind}="${name}"]`);
  const get = async path => { const got = await server(path, {}); return got.ok ? got.json() : null; };
  const heard = async () => {  // a kernel that trains is busy
    const state = kernel ? ((await get(`kernels/${kernel}`)) || {execution_state: "gone"}).execution_state : "busy";
    if (state === "busy") return true;
    const killed = await get(`contents/${at}?content=0`);
    if (all("panel").length) tell(killed ? await stopped(state)
      : `This run trains no more. kit.plot_run(${JSON.stringify(run)}) shows it; its cell, run again, goes on.`);
    return false;
  };
  const place = run.replace(/(^|[/\\])(?!\.\.)[^/\\]+[/\\]\.\.[/\\]/g, "$1");  // of the run, without a detour
  const stopped = async state => {  // from the run's folder: the last drawing may be older
    const here = at.slice(0, at.lastIndexOf("/"));
    const text = ((await get(`contents/${here}/metrics.jsonl?format=text`)) || {content: ""}).content;
    const steps = [...text.matchAll(/^\{"step": (\d+)/gm)].map(found => Number(found[1]));
    const files = ((await get(`contents/${here}`)) || {content: []}).content.map(file => file.name);
    const saved = files.map(file => /^checkpoint-(\d+)$/.exec(file)).filter(Boolean).map(found => Number(found[1]));
    const bar = [...all("progress")].map(e => e.querySelector("progress")).find(Boolean);
    const how = state === "gone" ? "shut down" : "restarted";
    const step = `step ${Math.max(0, ...steps)}${bar ? ` of ${bar.max}` : ""}`;
    return `This run stopped when its kernel was ${how}, at ${step}; to go on: run the cells up to the trainer, with `
      + (saved.length ? `folder=${JSON.stringify(place)}, then trainer.train(resume=True), which goes on after step `
        + `${Math.max(...saved)}, the last one saved.`
        : "a new folder, then trainer.train(): no step was saved.");
  };
  let drawn = 0, last = "";
  const show = (values, paused) => {
    for (const row of all("panel")) {
      for (const [key, value] of Object.entries(values))
        row.querySelectorAll(`[data-kit-key="${key}"]`).forEach(e => { e.placeholder = value; });
      row.querySelectorAll(".kit-pause").forEach(e => { e.textContent = paused ? "Go on" : "Pause"; });
    }
  };
  const look = async () => {
    if (document.hidden) return true;
    if (!await heard()) return false;
    const file = await get(`contents/${at}/LIVE?content=0`);
    if (!file || file.last_modified === last) return true;
    last = file.last_modified;
    if (Date.now() - drawn < 6000) return true;  // by the kernel
    const page = JSON.parse((await get(`contents/${at}/LIVE?format=text`)).content);
    for (const part of ["progress", "chart"]) all(part).forEach(e => { e.outerHTML = page[part]; });
    show(page.values, page.paused);
    tell(page.said || "This page was opened again: its chart is read from the run's folder.");
    return true;
  };
  const again = () => look().catch(() => true).then(goes => goes && setTimeout(again, 3000));
  const panels = window.kitPanels = window.kitPanels || {};
  if (folder && !panels[name]) {
    panels[name] = (...now) => { drawn = Date.now(); show(...now); };
    setTimeout(again, 3000);
  }
  let latest = "";
  const ask = async (request, words, effect) => {
    const number = crypto.getRandomValues(new Uint32Array(1))[0];
    const file = `${BigInt(Date.now()) * 1000000n}`.padStart(20, "0") + `-${number}.json`;
    const body = JSON.stringify({type: "file", format: "text", content: JSON.stringify(request)});
    tell(`${words} …`);
    latest = file;
    try {
      const got = await server(`contents/${at}/${file}`, {method: "PUT", body});
      if (!got.ok) tell(`Not asked: the server answered ${got.status}.`);
      else while (latest === file && await heard() && await get(`contents/${at}/${file}?content=0`)) {
        tell(`Heard. ${effect}`);  // it waits in the folder until the step is done; an earlier answer may come meanwhile
        await new Promise(later => setTimeout(later, 1000));
      }
    } catch (error) {
      tell(`Not asked: ${error.message}.`);
    }
  };
  const make = (tag, more, ...inside) => {
    const made = Object.assign(document.createElement(tag), more);
    made.append(...inside);
    return made;
  };
  const button = (text, title, onclick) => make("button", {type: "button", textContent: text, title, onclick});
  const pause = () => {
    const made = button("Pause", "wait after this step, with the model in memory", () =>
      made.textContent === "Pause"
        ? ask({do: "pause"}, "Asked to pause after this step", "The run pauses when this step is done.")
        : ask({do: "go on"}, "Asked to go on", "The run goes on."));
    return Object.assign(made, {className: "kit-pause"});
  };
  const number = (label, key, example) => {
    const field = make("input", {type: "text", size: 7, placeholder: values[key] || example});
    field.dataset.kitKey = key;
    const set = () => {
      const value = Number(field.value.trim() || NaN);
      if (value > 0 && Number.isFinite(value))
        ask({change: {[key]: value}}, `Asked for ${label} ${value}`, `The next step has ${label} ${value}.`);
      else tell(`Not asked: ${label} must be a number above 0, such as ${example}.`);
    };
    field.onkeydown = event => { if (event.key === "Enter") set(); };
    const row = make("span", {}, make("label", {}, `${label} `, field), " ",
      button("Set", `${label} from the next rollout buffer on`, set));
    row.style.whiteSpace = "nowrap";
    return row;
  };
  for (const row of document.querySelectorAll(`[data-kit-panel="${name}"]:not([data-kit-filled])`)) {
    row.setAttribute("data-kit-filled", "");
    if (!folder) {
      row.prepend(`Buttons need a run below ${root || "the server's folder"}, where JupyterLab was started. `);
      continue;
    }
    row.replaceChildren(pause(),
      button("Stop after this step", "end and save; the same cell goes on from there",
        () => ask({do: "stop"}, "Asked to stop after this step", "The run stops and is saved when this step is done.")),
      button("Save now", "a checkpoint after this step",
        () => ask({do: "save"}, "Asked to save after this step", "The run is saved when this step is done.")),
      number("learning rate", "learning_rate", "5e-6"), number("temperature", "temperature", "0.9"));
    row.setAttribute("data-lm-suppress-shortcuts", "true");  // else what is typed commands the notebook
    row.style.cssText += ";display:flex;flex-wrap:wrap;gap:4px 12px;align-items:center;padding:2px 0";
    for (const one of row.querySelectorAll("button, input"))
      one.style.cssText = "font:inherit;color:inherit;background:var(--jp-layout-color2,transparent);"
        + "border:1px solid var(--jp-border-color1,gray);border-radius:2px;padding:1px 8px";
    for (const one of row.querySelectorAll("button")) one.style.cursor = "pointer";
  }
})();
