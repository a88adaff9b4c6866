/** The conversations of this browser. */

import { useRef, useState } from "preact/hooks";
import { download } from "../../../shell/download.js";
import { Icon } from "../../../shell/icon.jsx";
import { address } from "../../../shell/router.js";
import { ICONS } from "../icons.js";
import { keepsNothing, list, load, records, remove, removeAll, save } from "../model/store.js";
import { exportText } from "../model/transfer.js";
import { IconButton } from "../../../shell/icon_button.jsx";

export function Sidebar({ currentId, onImport, onGone, onClose }) {
  const [filter, setFilter] = useState("");
  const file = useRef(null);
  const words = filter.toLowerCase();
  const found = list.value.filter((one) => one.title.toLowerCase().includes(words));

  async function exportAll() {
    download("quadriga-conversations.json", exportText(await records()));
  }
  async function clear() {
    if (!confirm(`Delete all ${list.value.length} conversations of this browser?`)) return;
    await removeAll();
    onGone();
  }
  return (
    <>
      <div class="panel-head">
        <a class="button primary wide" href={address("chat")} onClick={onClose}><Icon path={ICONS.add} size={18} />New chat</a>
        <span class="narrow-only"><IconButton icon={ICONS.close} label="Close" onClick={onClose} /></span>
      </div>
      {list.value.length > 7 && (
        <input type="search" aria-label="Search conversations" placeholder="Search" value={filter} onInput={(event) => setFilter(event.target.value)} />
      )}
      <ul class="conversations">
        {found.map((one) => (
          <Row key={one.id} about={one} isCurrent={one.id === currentId} onOpen={onClose} onGone={onGone} />
        ))}
      </ul>
      {!list.value.length && <p class="muted empty-note">Conversations stay in this browser.</p>}
      {keepsNothing.value && <p class="error-text empty-note">This browser keeps nothing for pages: conversations last as long as the tab.</p>}
      <div class="panel-foot">
        <FootButton icon={ICONS.upload} label="Import" about="conversations" onClick={() => file.current.click()} />
        <FootButton icon={ICONS.download} label="Export" about="all conversations" disabled={!list.value.length} onClick={exportAll} />
        <FootButton icon={ICONS.remove} label="Delete all" about="conversations" disabled={!list.value.length} onClick={clear} />
        <input
          ref={file} type="file" accept=".json,application/json" hidden aria-label="File to import"
          onChange={async (event) => {
            const [chosen] = event.target.files;
            if (chosen) onImport(await chosen.text());
            event.target.value = "";
          }}
        />
      </div>
    </>
  );
}

function FootButton({ icon, label, about, onClick, disabled }) {
  return (
    <button type="button" class="foot-button" onClick={onClick} disabled={disabled} aria-label={`${label} ${about}`}>
      <Icon path={icon} size={16} />{label}
    </button>
  );
}

function Row({ about, isCurrent, onOpen, onGone }) {
  const [isNamed, setNamed] = useState(false);
  async function rename(event) {
    event.preventDefault();
    const conversation = await load(about.id);
    const title = event.currentTarget?.elements?.title.value.trim() ?? "";
    if (conversation && title) {
      conversation.title.value = title;
      save(conversation);
    }
    setNamed(false);
  }
  async function drop() {
    if (!confirm(`Delete the conversation "${about.title}"?`)) return;
    await remove(about.id);
    if (isCurrent) onGone();
  }
  if (isNamed) {
    return (
      <li>
        <form class="rename" onSubmit={rename}>
          <input name="title" aria-label="Title" defaultValue={about.title} maxLength={120} ref={(one) => one?.focus()} onKeyDown={(event) => event.key === "Escape" && setNamed(false)} />
        </form>
      </li>
    );
  }
  return (
    <li class={isCurrent ? "current" : ""}>
      <a href={address("chat", about.id)} aria-current={isCurrent ? "page" : undefined} onClick={onOpen}>{about.title || "Untitled"}</a>
      <span class="row-tools">
        <IconButton icon={ICONS.edit} label={`Rename ${about.title}`} onClick={() => setNamed(true)} />
        <IconButton icon={ICONS.remove} label={`Delete ${about.title}`} onClick={drop} />
      </span>
    </li>
  );
}
