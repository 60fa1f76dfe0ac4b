// Browsers start no workers from files. Where the site is read from files, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html>";
      this.inside = new Promise((resolve, reject) => {
        this.frame.addEventListener("load", () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => this.hand(data, (copy) => this.onmessage?.(copy));
          const script = inside.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(inside);
          script.onerror = reject;
          inside.document.head.append(script);
        }, { once: true });
      });
      this.inside.catch((error) => this.onerror?.(error));
      document.documentElement.append(this.frame);
    }

    // As between a page and its worker: each side gets a copy, later.
    hand(data, take) {
      const copy = { data: structuredClone(data) };
      setTimeout(() => take(copy));
    }

    postMessage(data) {
      this.inside.then((inside) => this.hand(data, (copy) => inside.onmessage(copy)), () => {});
    }

    terminate() {
      this.frame.remove();
    }
  };
}
