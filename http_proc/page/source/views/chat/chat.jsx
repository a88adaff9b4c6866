/** The chat: conversations, the messages of one, the field for the next, and the settings. */

import "./chat.css";
import "./markdown.css";
import { signal } from "@preact/signals";
import { useEffect, useLayoutEffect, useMemo, useState } from "preact/hooks";
import { loadModels, models, textModels } from "../../api/models.js";
import { IconButton } from "../../shell/icon_button.jsx";
import { ModelChoice } from "../../shell/model_choice.jsx";
import { currentRoute, replace, route } from "../../shell/router.js";
import { stored } from "../../shell/stored.js";
import { preactView } from "../preact_view.jsx";
import { Composer } from "./composer.jsx";
import { ICONS } from "./icons.js";
import { Actions } from "./model/actions.js";
import { Conversation } from "./model/conversation.js";
import { resume, running } from "./model/generation.js";
import { DEFAULTS, shortName } from "./model/settings.js";
import { addNew, load, loadList, save } from "./model/store.js";
import { importText } from "./model/transfer.js";
import { SettingsPanel } from "./panels/settings_panel.jsx";
import { Sidebar } from "./panels/sidebar.jsx";
import { Thread } from "./thread/thread.jsx";
import { Welcome } from "./welcome.jsx";

/** Settings of the last conversation, with which a new one begins. */
const lastSettings = stored("quadriga.chat.settings", DEFAULTS);
const ranges = signal({});

function Chat({ path, page }) {
  const [conversation, setConversation] = useState(() => new Conversation({ settings: lastSettings.value }));
  const [panel, setPanel] = useState("");
  const [problem, setProblem] = useState(null);
  const id = path[0];
  const isReady = isAt(route.value.path[0], conversation); // otherwise the one of the address is being opened

  useEffect(() => {
    loadList();
    loadServer(page.server, setError);
  }, []);
  // A layout effect: a message sent right after the address changed belongs to the new one.
  useLayoutEffect(() => {
    let isLeft = false;
    if (!isAt(id, conversation)) openConversation(id, page, () => isLeft, setConversation);
    setProblem((one) => (one?.at === id ? one : null));
    return () => {
      isLeft = true;
    };
  }, [id]);
  useLayoutEffect(() => onChange(conversation.settings, (settings) => {
    lastSettings.value = settings;
    if (conversation.messages.size) save(conversation);
  }), [conversation]);

  const actions = useMemo(() => new Actions(conversation, page.server, modelOf), [conversation]);
  const isEmpty = !conversation.shownPath().length;
  const isBusy = [...running.value.values()].some((one) => one.conversation === conversation);

  // A layout effect: Escape stops what is shown, also before the browser has painted it.
  useLayoutEffect(() => {
    const onKey = (event) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      if (panel) setPanel("");
      else if (isBusy) actions.stop();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });

  /** Show an error at the address where it happened. */
  function setError(error) {
    setProblem(error && { error, at: currentRoute().path[0] });
  }
  /** Send a message, and return whether the settings allow it. */
  function send(text) {
    setError(null);
    addNew(conversation);
    try {
      actions.send(text);
    } catch (error) {
      setError(error);
      return false;
    }
    if (currentRoute().path[0] !== conversation.id) replace("chat", conversation.id);
    return true;
  }
  function onImport(text) {
    try {
      const made = importText(text);
      for (const one of made) save(addNew(one));
      if (made.length) page.go("chat", made[0].id);
    } catch (error) {
      setError(error);
    }
  }
  const close = () => setPanel("");
  return (
    <div class="chat" data-panel={panel}>
      <aside class="sidebar" aria-label="Conversations">
        <Sidebar currentId={conversation.id} onImport={onImport} onGone={() => page.go("chat")} onClose={close} />
      </aside>
      <section class="main">
        <header class="chat-head">
          <span class="narrow-only"><IconButton icon={ICONS.list} label="Conversations" size={20} onClick={() => setPanel("list")} /></span>
          <h1>{conversation.title.value || "New chat"}</h1>
          <ModelOfChat settings={conversation.settings} />
          <IconButton icon={ICONS.settings} label="Settings" size={20} pressed={panel === "settings"} onClick={() => setPanel(panel === "settings" ? "" : "settings")} />
        </header>
        {!isEmpty
          ? <Thread conversation={conversation} actions={actions} onError={setError} />
          : isReady
            ? <Welcome model={modelOf(conversation.settings.value)} onPick={send} />
            : <div class="opening" aria-busy="true" />}
        {problem && <ErrorBar error={problem.error} onClose={() => setError(null)} />}
        <Composer isBusy={isBusy} isReady={() => isAt(currentRoute().path[0], conversation)} onSend={send} onStop={() => actions.stop()} />
      </section>
      {panel === "settings" && isReady && (
        <aside class="settings-panel" aria-label="Settings">
          <SettingsPanel settings={conversation.settings} models={textModels()} ranges={ranges.value} onClose={close} />
        </aside>
      )}
      {panel && <div class="veil" onClick={close} />}
    </div>
  );
}

/** The model that answers: its name, or the choice of one of several. */
function ModelOfChat({ settings }) {
  const list = textModels();
  if (list.length > 1) {
    const choose = (model) => (settings.value = { ...settings.peek(), model });
    return <ModelChoice value={settings.value.model} list={list} onChange={choose} />;
  }
  const id = settings.value.model || list[0]?.id || "";
  return <span class="model" title={`Model: ${id}`}>{shortName(id)}</span>;
}

/** Return the model that answers; undefined for one that the server does not list. */
function modelOf({ model }) {
  return model ? models.value.find((one) => one.id === model) : textModels()[0];
}

/** Whether a conversation is the one of an address; an address without an id is an empty one's. */
function isAt(id, conversation) {
  return id ? id === conversation.id : !conversation.messages.size;
}

/** Call `act` with each later value of a signal; return what ends that. */
function onChange(one, act) {
  let isFirst = true;
  return one.subscribe((value) => {
    if (!isFirst) act(value);
    isFirst = false;
  });
}

async function loadServer(server, onError) {
  try {
    await loadModels(server);
    const document = await server.get("openapi.json");
    ranges.value = rangesOf(document.components.schemas.ChatRequest.properties);
  } catch (error) {
    onError(error);
  }
}

/** Return { minimum, maximum, default } of each field of a request. */
function rangesOf(properties) {
  const entries = Object.entries(properties).map(([name, schema]) => {
    const one = schema.anyOf?.[0] ?? schema;
    return [name, { minimum: one.minimum ?? one.exclusiveMinimum, maximum: one.maximum, default: one.default }];
  });
  return Object.fromEntries(entries);
}

/**
 * Show the conversation of an address; without an id, or with one that is not there, a new one.
 * `isLeft()`: the address has changed meanwhile. The answers of the conversation go on even then.
 */
async function openConversation(id, page, isLeft, onOpen) {
  const found = id ? await load(id) : null;
  if (!isLeft()) {
    if (id && !found) replace("chat");
    onOpen(found ?? new Conversation({ settings: { ...lastSettings.value, system: "" } }));
  }
  if (found) resume(found, { server: page.server, save: () => save(found) });
}

function ErrorBar({ error, onClose }) {
  return (
    <div class="error-bar" role="alert">
      <span>{error.message}</span>
      <IconButton icon={ICONS.close} label="Close message" onClick={onClose} />
    </div>
  );
}

export const chatView = preactView({
  name: "chat",
  title: "Chat",
  icon: ICONS.chat,
  component: Chat,
});
