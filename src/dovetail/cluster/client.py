"""The API from Python: one method for each verb. Imports no third-party package but msgspec."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dovetail.core.errors import Error

from .home import Home, default_home, read_token


class Unreachable(Error):
    """No cluster answers at this address."""


class RequestRefused(Error):
    """The cluster refused the request; `status` is the HTTP status code."""

    def __init__(self, line: str, status: int) -> None:
        self.status = status
        super().__init__(line)


class Client:
    """A cluster by its home (the default one if None) or by its URL and token."""

    def __init__(self, where: Path | str | None = None, token: str = "", *, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._token = token
        if isinstance(where, str) and where.startswith(("http://", "https://")):
            self._url, self.home = where.rstrip("/"), None
        else:
            self._url, self.home = "", Home(Path(where) if where is not None else default_home())

    def submit(self, submission: dict[str, Any]) -> dict[str, Any]:
        """Submits a job, given the fields of `job.submission.Submission`; the new job."""
        return self._ask("POST", "/jobs", submission)

    def jobs(self, *, state: str = "", limit: int = 1000, before: int = 0) -> list[dict[str, Any]]:
        """Newest first."""
        found: list[dict[str, Any]] = self._ask("GET", f"/jobs?state={state}&limit={limit}&before={before}")["jobs"]
        return found

    def job(self, job: int | str) -> dict[str, Any]:
        return self._ask("GET", f"/jobs/{_number(job)}")

    def status(self, *, jobs: bool = True) -> dict[str, Any]:
        return self._ask("GET", "/status" if jobs else "/status?jobs=false")

    def why(self, job: int | str) -> dict[str, Any]:
        return self._ask("GET", f"/jobs/{_number(job)}/why")

    def logs(self, job: int | str, *, offset: int = -1, limit: int = 65536) -> dict[str, Any]:
        """At most `limit` bytes of its log: `text`, and the `offset` after it. A negative offset: the last bytes."""
        return self._ask("GET", f"/jobs/{_number(job)}/logs?offset={offset}&limit={limit}")

    def cancel(self, job: int | str) -> dict[str, Any]:
        return self._ask("POST", f"/jobs/{_number(job)}/cancel")

    def pause(self, job: int | str) -> dict[str, Any]:
        return self._ask("POST", f"/jobs/{_number(job)}/pause")

    def resume(self, job: int | str) -> dict[str, Any]:
        return self._ask("POST", f"/jobs/{_number(job)}/resume")

    def timeline(self, *, limit: int = 10_000) -> dict[str, Any]:
        return self._ask("GET", f"/timeline?limit={limit}")

    def down(self, *, grace: float = 10.0) -> dict[str, Any]:
        return self._ask("POST", "/down", {"grace": grace})

    @property
    def url(self) -> str:
        """The address of the API; an Error if no cluster runs."""
        return self._where()[0]

    def raw(self, path: str) -> bytes:
        """The answer for browsers: "/" is the page, "/data.json" what it shows."""
        text, status = self._fetch("GET", path)
        if status >= 400:
            raise RequestRefused(
                " ".join(text.decode("utf-8", "replace").removeprefix("dovetail: ").split())[:300], status
            )
        return text

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        text, status = self._fetch(method, path, body)
        try:
            found = json.loads(text)
        except ValueError:
            raise Unreachable(f"{self.url}: something other than a cluster answers") from None
        if status >= 400:
            detail = found.get("detail") if isinstance(found, dict) else None
            raise RequestRefused(str(detail or f"the cluster answered {status}"), status)
        assert isinstance(found, dict), "every answer is an object"
        return found

    def _fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[bytes, int]:
        url, token = self._where()
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        if not parts.hostname:
            raise Error(f"{url}: expected the address of a cluster, http://HOST:PORT")
        connection = kind(parts.hostname, parts.port, timeout=self._timeout)
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            data = json.dumps(body).encode() if body is not None else None
            connection.request(method, path, body=data, headers=headers)
            answer = connection.getresponse()
            return answer.read(), answer.status
        except (OSError, http.client.HTTPException) as e:
            raise Unreachable(f"{url}: no cluster answers ({e})") from None
        finally:
            connection.close()

    def _where(self) -> tuple[str, str]:
        if self.home is None:
            return self._url, self._token
        address = self.home.address()
        if address is None or self.home.supervisor() is None:
            raise Unreachable(f"no cluster runs in {self.home.path}: start one with `dovetail cluster up`")
        token = self._token
        if not token and address.token_file:
            token = read_token(Path(address.token_file))
        return address.url, token


def _number(job: int | str) -> int:
    try:
        return int(job)
    except ValueError:
        raise Error(f"job {job!r}: expected its number") from None
