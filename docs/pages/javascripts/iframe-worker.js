// SPDX-License-Identifier: Apache-2.0
// A page that is opened as a file may start no worker, and the theme searches in one. Here a hidden
// frame runs the worker's script. The name of this file keeps mkdocs from fetching another's.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      this.inside = inside;
      script.src = url;
      inside.document.body.append(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
