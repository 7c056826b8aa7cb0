"""Encryption of what is kept: Fernet, with the record's identity inside."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken

from ..errors import EncryptionError
from ..records import BodyKind, KeptResponse, StoredResponse

__all__ = ["Cipher"]


class Cipher:
    """Turns an answer into what a store keeps, and back.

    With keys, status, headers and body are one Fernet token (https://github.com/fernet/spec). The digest of the record
    is encrypted with them and compared, so that a token moved to another record is refused.

    :param keys: Fernet keys, newest first: the first encrypts, all decrypt. Empty: nothing is encrypted.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._fernets = {_key_id(key): Fernet(key) for key in keys}
        self._newest = next(iter(self._fernets), "")

    def seal(self, digest: str, response: StoredResponse) -> KeptResponse:
        """The answer as it is stored for the record ``digest``."""
        headers = json.dumps(response.headers, separators=(",", ":")).encode("ascii")
        body = response.body or b""
        if not self._newest:
            return KeptResponse(response.status, headers, body, response.kind.value)
        clear = b"\n".join([digest.encode("ascii"), str(response.status).encode("ascii"), headers, body])
        token = self._fernets[self._newest].encrypt(clear)
        return KeptResponse(0, b"", token, response.kind.value, self._newest)

    def open(self, digest: str, kept: KeptResponse) -> StoredResponse:
        """The answer in clear.

        :raises EncryptionError: the key is not among ours, or what is stored was changed or can't be parsed.
        """
        if kept.cipher:
            status, headers, body = self._decrypt(digest, kept)
        else:
            status, headers, body = kept.status, kept.headers, kept.body
        try:
            kind = BodyKind(kept.kind)
            pairs = tuple((str(name), str(value)) for name, value in json.loads(headers))
            if not 100 <= status <= 599:
                raise ValueError("not a status")
        except (ValueError, TypeError) as error:
            raise EncryptionError("what is stored can't be parsed") from error
        return StoredResponse(status, pairs, None if kind is BodyKind.NONE else body, kind)

    def seal_text(self, digest: str, text: bytes) -> bytes:
        """Some bytes as they are stored for the record ``digest``: the id of the key, and the token."""
        if not self._newest:
            return b":" + text
        token = self._fernets[self._newest].encrypt(digest.encode("ascii") + b"\n" + text)
        return self._newest.encode("ascii") + b":" + token

    def open_text(self, digest: str, kept: bytes) -> bytes:
        """Those bytes in clear.

        :raises EncryptionError: the key is not among ours, or what is stored was changed.
        """
        name, _, rest = kept.partition(b":")
        if not name:
            return rest
        fernet = self._fernets.get(name.decode("ascii", "replace"))
        if fernet is None:
            raise EncryptionError("what is stored was encrypted with a key that is not in IDEMPOTENT_FERNET_KEYS")
        try:
            owner, _, text = fernet.decrypt(rest).partition(b"\n")
        except InvalidToken as error:
            raise EncryptionError("what is stored was changed, or is damaged") from error
        if not hmac.compare_digest(owner, digest.encode("ascii")):
            raise EncryptionError("what is stored belongs to another record")
        return text

    def _decrypt(self, digest: str, kept: KeptResponse) -> tuple[int, bytes, bytes]:
        fernet = self._fernets.get(kept.cipher)
        if fernet is None:
            raise EncryptionError(
                f"what is stored was encrypted with key {kept.cipher}, which is not in IDEMPOTENT_FERNET_KEYS: "
                "keep a retired key at the end of the list until all that it encrypted has expired"
            )
        try:
            owner, status, headers, body = fernet.decrypt(kept.body).split(b"\n", 3)
            code = int(status)
        except (InvalidToken, ValueError) as error:
            raise EncryptionError("what is stored was changed, or is damaged") from error
        if not hmac.compare_digest(owner, digest.encode("ascii")):
            raise EncryptionError("what is stored belongs to another record")
        return code, headers, body


def _key_id(key: bytes) -> str:
    """Eight digits that name a key without telling it."""
    return hashlib.sha256(b"flask-idempotent key id\0" + key).hexdigest()[:8]
