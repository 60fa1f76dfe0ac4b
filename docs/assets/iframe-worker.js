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
          inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
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

    postMessage(data) {
      this.inside.then((inside) => setTimeout(() => inside.onmessage({ data })), () => {});
    }

    terminate() {
      this.frame.remove();
    }
  };
}
