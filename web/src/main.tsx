import { render } from "preact";
import { App } from "./app";
import type { Document } from "./document";
import { COLORS } from "./palette";
import "./style.css";

const data = JSON.parse(document.getElementById("data")!.textContent!) as Document;
Object.assign(COLORS, data.colors);
const root = document.getElementById("app")!;
root.replaceChildren();
render(<App first={data} />, root);
performance.mark("dovetail-shown");
