"""Images of a data set's rows: files near the data file, bytes as the package datasets stores them, pictures of PIL.

This module loads no torch, so that a missing file is reported at once.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from covey.config import ConfigError
from covey.config.fields import plural
from covey.config.files import faults_of, read_file, shortened

COLUMNS = ("images", "image")  # TRL's names; verl has the first
PLACE = "<image>"  # verl's mark of an image in the text of a message
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # PIL would start other programs for some others
MOST_BYTES = 64 << 20  # of a file
MOST_PIXELS = 1 << 26  # of an image


@dataclass(frozen=True, eq=False)
class Picture:
    """An image that is decoded when it is used."""

    name: str  # for messages
    source: Any  # a path, the bytes of a file, or a picture of PIL
    label: str  # for columns: its name in the data, else the digest
    known: str = ""  # the digest of one that has no path

    @property
    def digest(self) -> str:
        """Of its content, which a file may change."""
        if not isinstance(self.source, Path):
            return self.known
        with faults_of(self.source):
            status = self.source.stat()
        return _digest_of(self.source, status.st_size, status.st_mtime_ns)

    def open(self) -> Image.Image:
        """The image in RGB, turned as its file says. Raises ConfigError if it cannot be decoded."""
        content = read_file(self.source, MOST_BYTES) if isinstance(self.source, Path) else self.source
        try:
            if isinstance(content, Image.Image):
                return _rgb(content)
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise ValueError(f"{width} x {height} pixels, and at most {MOST_PIXELS:,} are read")
                return _rgb(image)
        except UnidentifiedImageError as error:  # whose text is the address of an object
            raise ConfigError(f"the image {self.name} is none of {', '.join(FORMATS)}: replace it") from error
        except Exception as error:  # PIL's decoders raise many kinds for a damaged file
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"the image {self.name} cannot be decoded ({reason:.150}): replace it") from error


def _rgb(image: Image.Image) -> Image.Image:
    """The image as a person sees it on a white page. Raises ValueError for values without a known range."""
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits, of which the value of white is unknown: save it with 8 or 16")
    if image.mode.startswith("I;16"):  # PIL would make white of all but the darkest
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


class ImagePrompt(list[Mapping[str, Any]]):
    """Chat messages in whose texts PLACE stands for each of the images, in their order. Rewards and records have the
    messages alone.
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]], pictures: Sequence[Picture] = ()) -> None:
        super().__init__(messages)
        self.pictures = tuple(pictures)

    @property
    def digest(self) -> str:
        """Differs for images of another content."""
        return ",".join(picture.digest for picture in self.pictures)


def take_pictures(columns: dict[str, Any], folder: Path) -> tuple[Picture, ...]:
    """Remove the columns with images from a row; returns the images.

    Args:
        columns: of the row.
        folder: that names of files begin at.

    Raises:
        ValueError: with the fault of the row.
    """
    given = {name: value for name in COLUMNS if (value := columns.pop(name, None)) is not None}
    if len(given) > 1:
        raise ValueError(f"it has both {COLUMNS[0]!r} and {COLUMNS[1]!r}: keep one of these columns")
    return tuple(
        _picture(one, name, folder)
        for name, value in given.items()
        for one in (value if isinstance(value, (list, tuple)) else [value])
    )


def has_parts(messages: Sequence[Any]) -> bool:
    """True if the content of a message is a list of parts, as chat templates take it too."""
    return any(isinstance(one, Mapping) and isinstance(one.get("content"), (list, tuple)) for one in messages)


def with_pictures(messages: Sequence[Any], pictures: Sequence[Picture]) -> ImagePrompt:
    """A prompt with a place for each image. Messages without a place have all of them at the beginning of the first
    message of the user; a content that is a list of parts becomes a text.

    Raises:
        ValueError: if the messages have another number of places, or parts that are neither a text nor an image.
    """
    found = [dict(message) if isinstance(message, Mapping) else message for message in messages]
    known = [message for message in found if isinstance(message, dict)]
    for message in known:
        if has_parts([message]):
            message["content"] = _text(message["content"])
    texts = [message["content"] for message in known if isinstance(message.get("content"), str)]
    if not (places := sum(text.count(PLACE) for text in texts)) and pictures:
        first = next((message for message in known if message.get("role") == "user"), None)
        if first is not None and isinstance(first.get("content"), str):
            first["content"] = PLACE * len(pictures) + first["content"]
            places = len(pictures)
    if places != len(pictures) and len(texts) == len(found):  # a message without a text is refused by `check_prompt`
        raise ValueError(
            f"the prompt has {plural(places, 'place')} for images ({PLACE}), and the row has "
            f"{plural(len(pictures), 'image')}: write {PLACE} once for each, or nowhere, which puts them first"
        )
    return ImagePrompt(found, pictures)


def _text(parts: Sequence[Any]) -> str:
    """The text of a list of parts. Raises ValueError for a part of another kind."""
    texts = []
    for part in parts:
        given = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
        if given == {"type": "image"}:
            texts.append(PLACE)
        elif given.keys() <= {"type", "text"} and isinstance(given.get("text"), str):
            texts.append(given["text"])
        else:
            raise ValueError(
                f"a content has the part {shortened(str(part))}: parts are {{'type': 'text', 'text': ...}} and "
                "{'type': 'image'}, whose image is in the column 'images'"
            )
    return "".join(texts)


def _picture(value: Any, column: str, folder: Path) -> Picture:
    """The image of a value. Raises ValueError if it is none."""
    if isinstance(value, Image.Image):
        try:
            colours = value.getpalette(), value.info.get("transparency")
            digest = _digest(f"{value.mode} {value.size} {colours} ".encode() + value.tobytes())
            return Picture("of PIL", value, digest, digest)
        except OSError as error:  # its file is read when it is used first
            raise ValueError(f"{column!r} has a picture that cannot be decoded ({error}): replace it") from None
    parts = value if isinstance(value, Mapping) else {"bytes" if isinstance(value, bytes) else "path": value}
    content, name = parts.get("bytes"), parts.get("path")
    if isinstance(content, bytes):
        shown = f"{shortened(name)} in {column!r}" if isinstance(name, str) else f"in {column!r}"
        digest = _digest(content)
        return Picture(shown, content, name if isinstance(name, str) else digest, digest)
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{column!r} has a value that is not an image: give names of files, {{'bytes', 'path'}} as the package "
            "datasets stores them, or pictures of PIL; or name the column otherwise"
        )
    if "://" in name or name.startswith("data:"):
        raise ValueError(f"{column!r} has the address {shortened(name)}, and no image is downloaded: give files")
    path = folder / name
    shown = shortened(name) if Path(name).is_absolute() else f"{shortened(name)} in {folder}"
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        status = None
    if status is None or not S_ISREG(status.st_mode):
        raise ValueError(f"{column!r}: there is no file {shown}; names of images begin at the data file")
    return Picture(shown, path, name)


@lru_cache(maxsize=1 << 16)  # several rows may ask about one image
def _digest_of(path: Path, _size: int, _changed: int) -> str:
    return _digest(read_file(path, MOST_BYTES))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
