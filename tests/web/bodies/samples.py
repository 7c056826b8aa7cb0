"""Bodies of requests, and the ways in which a view reads one."""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from flask import Request


class Sample(NamedTuple):
    """A body and the type that is said of it; ``None`` for none."""

    data: bytes
    content_type: str | None


def multipart(parts: "Iterable[tuple[Any, ...]]", boundary: str = "frontier-1") -> Sample:
    """Parts are ``(name, value)``, or ``(name, value, filename, content type)`` for a file."""
    lines: list[bytes] = []
    for name, value, *file in parts:
        disposition = f'Content-Disposition: form-data; name="{name}"'
        head = [f"--{boundary}", disposition]
        if file:
            head = [f"--{boundary}", f'{disposition}; filename="{file[0]}"', f"Content-Type: {file[1]}"]
        lines += ["\r\n".join(head).encode(), b"", value if isinstance(value, bytes) else value.encode()]
    lines += [f"--{boundary}--".encode(), b""]
    return Sample(b"\r\n".join(lines), f"multipart/form-data; boundary={boundary}")


ORDER = [("item", "tea"), ("item", "milk"), ("note", "grün"), ("picture", b"\0\xff\r\n--x", "a.png", "image/png")]

SAMPLES = {
    "JSON": Sample(b'{"amount": 1, "item": "tea"}', "application/json"),
    "vendor's JSON": Sample(b'{"amount": 1}', "application/vnd.shop+json"),
    "malformed JSON": Sample(b'{"amount": 1', "application/json"),
    "JSON in latin-1": Sample('{"note": "grün"}'.encode("latin-1"), "application/json; charset=latin-1"),
    "null": Sample(b"null", "application/json"),
    "form": Sample(b"item=tea&item=milk&note=gr%C3%BCn&empty=", "application/x-www-form-urlencoded"),
    "form in latin-1": Sample(b"note=gr%FCn", "application/x-www-form-urlencoded; charset=latin-1"),
    "form of junk": Sample(b"&&=;%zz\xff", "application/x-www-form-urlencoded"),
    "multipart": multipart(ORDER),
    "multipart without boundary": Sample(multipart(ORDER).data, "multipart/form-data"),
    "multipart that breaks off": multipart(ORDER)._replace(data=multipart(ORDER).data[:-30]),
    "text": Sample("grün\r\n".encode(), "text/plain"),
    "CSV": Sample(b"a;b\r\n1;2\r\n", "text/csv; charset=latin-1"),
    "unknown charset": Sample(b"x", "text/plain; charset=nonsense"),
    "binary": Sample(bytes(range(256)), "application/octet-stream"),
    "no type": Sample(b"anything", None),
    "a type of junk": Sample(b"anything", ";;;/"),
    "empty": Sample(b"", None),
    "empty JSON": Sample(b"", "application/json"),
    "empty form": Sample(b"", "application/x-www-form-urlencoded"),
    "empty multipart": Sample(b"", "multipart/form-data; boundary=frontier-1"),
}


def _files(request: Request) -> Any:
    return [
        (name, file.stream.tell(), file.filename, file.content_type, hashlib.sha256(file.read()).hexdigest())
        for name, file in request.files.items(multi=True)
    ]


def _in_pieces(request: Request) -> str:
    pieces = []
    while piece := request.stream.read(7):
        pieces.append(piece)
    return b"".join(pieces).hex()


#: What a view makes of its body. Each gives a JSON value, or raises what Flask raises.
READERS: "dict[str, Callable[[Request], Any]]" = {
    "stream": lambda request: request.stream.read().hex(),
    "stream in pieces": _in_pieces,
    "lines of the stream": lambda request: [line.hex() for line in request.stream],
    "wsgi.input": lambda request: request.environ["wsgi.input"].read(request.content_length or 0).hex(),
    "get_data": lambda request: request.get_data().hex(),
    "get_data(cache=False)": lambda request: request.get_data(cache=False).hex(),
    "get_data(as_text)": lambda request: request.get_data(as_text=True),
    "get_data(parse_form_data)": lambda request: [
        request.get_data(parse_form_data=True).hex(),
        list(request.form.items(multi=True)),
    ],
    "data": lambda request: request.data.hex(),
    "json": lambda request: request.json,
    "get_json(force, silent)": lambda request: request.get_json(force=True, silent=True),
    "form": lambda request: list(request.form.items(multi=True)),
    "files": _files,
    "values": lambda request: list(request.values.items(multi=True)),
    "form, then files": lambda request: [list(request.form.items(multi=True)), _files(request)],
    "get_data, then form": lambda request: [request.get_data().hex(), list(request.form.items(multi=True))],
    "form, then stream": lambda request: [list(request.form.items(multi=True)), request.stream.read().hex()],
    "form, then get_data": lambda request: [list(request.form.items(multi=True)), request.get_data().hex()],
    "get_json, then get_data": lambda request: [request.get_json(silent=True), request.get_data().hex()],
    "nothing": lambda request: None,
}


def dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
