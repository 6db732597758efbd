"""Reads the commands of a shell script with its variables expanded. Nothing of the script is executed.

Assignments, arrays, arithmetic, `source` of files that exist, and tests of strings and numbers are followed.
What only a running shell knows stays visible in the words: `${oc.env:NAME}` for a variable that the script
does not set, `$@` and `${NAME[@]}` for arguments and arrays that it does not have, and UNKNOWN for the output
of a command that computes no number. Both branches of an undecided test are read.

    script = ShellScript(Path("run.sh"))
    for words in script.commands():
        ...  # ["python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=1024"]
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.expressions import MOST_CHARACTERS, evaluate, printed, read_limited

UNKNOWN = "???"
_MOST_FILES = 20  # of `source`, so that files which name each other end
_LOOK_UP = 100  # characters that a variable in arithmetic counts as
_DEEPEST = 20  # of substitutions in each other
_MOST_NUMBERS = 1000  # of `seq`
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[\w*\])?(\+?=)")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#?!$-])(\[[^\]]*\])?(.*)", re.DOTALL)
_HEREDOC = re.compile(
    r"<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1([^\n]*)\n.*?^[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE
)
_REDIRECTION = re.compile(r"\d*(>>?|<)(&?\S*)")
_FROM_OUTSIDE = re.compile(r"\$\{oc\.env:[^}]*\}|\$@|\$\{\w+\[@\]\}")
_OPENINGS = ("then", "else", "do", "{", "!", "time", "exec", "nohup", "sudo")


class ShellScript:
    """The commands of a script and of the files that it sources, as if it ran without arguments."""

    def __init__(self, file: Path, text: str | None = None) -> None:
        """Begin without variables.

        Args:
            text: The script, if it is a part of the file.
        """
        self._file = file
        self._text = text
        self._variables: dict[str, str | list[str]] = {}
        self._environment: dict[str, str] = {}  # values before a command, or empty for exported variables
        self._read_names: set[str] = set()
        self._num_files = 0
        self._num_characters = 0
        self._depth = 0

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the commands so far have and the script itself does not read."""
        names = sorted(self._environment.keys() - self._read_names)
        values = {name: self._environment[name] or self._variables.get(name) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, str)}

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command that is neither an assignment nor a test."""
        yield from self._read(self._file, read_limited(self._file) if self._text is None else self._text)

    def _read(self, file: Path, text: str) -> Iterator[list[str]]:
        self._num_files += 1
        branches: list[list[bool | None]] = []  # of each open `if`: whether one was taken, and this one is
        in_loop = 0
        in_condition = False
        last: bool | None = None

        for separator, words in split_commands(_HEREDOC.sub(r"\3", text)):
            while words and words[0] in _OPENINGS:
                in_condition = in_condition and words[0] != "then"
                if words[0] == "else" and branches:
                    branches[-1][1] = not branches[-1][0]
                words = words[1:]
            if not words:
                continue
            first = words[0]

            # Loops and choices by pattern depend on arguments, so their bodies are skipped.
            in_loop += first in ("while", "until", "case")
            if first in ("done", "esac"):
                in_loop = max(0, in_loop - 1)
            if in_loop or first in ("done", "esac"):
                continue
            if first == "for":
                in_loop += len(words) < 4
                if len(words) >= 4:
                    self._variables[words[1]] = (self._expanded(words[3]) or [""])[0]
                continue

            if first in ("if", "elif"):
                taken = first == "elif" and bool(branches) and branches.pop()[0]
                holds = self._holds(words[1:]) if all(frame[1] is not False for frame in branches) else False
                branches.append([taken or holds, not taken and holds is not False])
                in_condition = not taken
                continue
            # The other parts of a condition, as in `if [ -z "$A" ] || [ "$A" = 0 ]; then`.
            if in_condition and first in ("[", "[[") and separator in ("||", "&&"):
                holds = _joined(branches[-1][0], separator, self._holds(words))
                branches[-1] = [holds, holds is not False]
                continue
            if first == "fi":
                if branches:
                    branches.pop()
                continue
            if any(frame[1] is False for frame in branches):
                continue
            if (separator == "&&" and last is False) or (separator == "||" and last is True):
                continue

            last = None
            if first in ("[", "[[", "test"):
                last = self._holds(words)
                continue
            yield from self._run(file, words)

    def _run(self, file: Path, words: list[str]) -> Iterator[list[str]]:
        """Follow assignments and `source`, and yield the words of any other command."""
        is_declaration = words[0] in ("export", "local", "declare", "readonly", "typeset")
        rest = [word for word in words if not (is_declaration and word.startswith("-"))][is_declaration:]
        num_assignments = next(
            (index for index, word in enumerate(rest) if not _ASSIGNMENT.match(word)), len(rest)
        )
        if is_declaration or num_assignments == len(rest):
            # A declaration may also have names without a value, as in `export A B=1`.
            for word in filter(_ASSIGNMENT.match, rest):
                self._assign(word, file)
            if words[0] == "export":
                self._environment |= {re.split(r"\+?=", word)[0]: "" for word in rest}
            return

        # Assignments before a command are its environment only.
        for word in rest[:num_assignments]:
            name, _, value = word.partition("=")
            self._environment[name] = " ".join(self._expanded(value, file))

        expanded = [each for word in rest[num_assignments:] for each in self._expanded(word, file)]
        if expanded[:1] in (["source"], ["."]) and len(expanded) > 1:
            sourced = file.parent / expanded[1]
            # Unlike Path.is_file(), this is false for a name that is too long.
            if os.path.isfile(sourced) and self._num_files < _MOST_FILES:
                yield from self._read(sourced, read_limited(sourced))
            return
        if kept := [word for word in expanded if not _REDIRECTION.fullmatch(word)]:
            yield kept

    def _assign(self, word: str, file: Path) -> None:
        match = _ASSIGNMENT.match(word)
        assert match is not None
        name, sign = match.groups()
        written = word[match.end() :]
        before = self._variables.get(name, "")
        new: str | list[str]
        if written.startswith("("):
            inner = [each for _, words in split_commands(written[1:-1]) for each in words]
            new = [each for item in inner for each in self._expanded(item, file)]
            if sign == "+=":
                new = [*([before] if isinstance(before, str) and before else before), *new]
        else:
            new = " ".join(self._expanded(f'"{written}"' if _is_bare(written) else written, file))
            if sign == "+=":
                new = (before if isinstance(before, str) else " ".join(before)) + new
        self._variables[name] = new

    def _holds(self, words: list[str]) -> bool | None:
        """Return whether a test holds; None if only a running shell knows. An unset variable is empty."""
        texts = [each for word in words for each in (self._expanded(word) or [""])]
        texts = [_FROM_OUTSIDE.sub("", text) for text in texts]
        if not texts or texts[0] not in ("[", "[[", "test") or any(UNKNOWN in text for text in texts):
            return None
        inner = [text for text in texts[1:] if text not in ("]", "]]")]
        if inner[:1] == ["!"]:
            opposite = self._holds(["[", *inner[1:]])
            return None if opposite is None else not opposite
        numbers = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
        match inner:
            case ["-z", *text]:
                return not "".join(text)
            case ["-n", text]:
                return bool(text)
            case [one, "=" | "==", other]:
                return fnmatch.fnmatchcase(one, other)
            case [one, "!=", other]:
                return not fnmatch.fnmatchcase(one, other)
            case [one, sign, other] if sign in numbers:
                try:
                    return bool(evaluate(f"{int(one)} {numbers[sign]} {int(other)}", str))
                except ValueError:
                    return None
        return None

    def _expanded(self, raw: str, file: Path | None = None) -> list[str]:
        """Return the words that a written word stands for."""
        words: list[str] = []
        current: str | None = None
        is_quoted = False
        is_no_word = False  # a quoted array without items
        index = 0

        while index < len(raw):
            character = raw[index]
            if character == "'" and not is_quoted:
                end = raw.find("'", index + 1)
                end = len(raw) if end < 0 else end
                current = (current or "") + raw[index + 1 : end]
                index = end + 1
            elif character == '"':
                is_quoted = not is_quoted
                current = None if is_no_word and not current else current or ""
                is_no_word = False
                index += 1
            elif character == "\\" and index + 1 < len(raw):
                escaped = raw[index + 1]
                keeps = is_quoted and escaped not in '"\\$`\n'
                current = (current or "") + ("\\" if keeps else "") + ("" if escaped == "\n" else escaped)
                index += 2
            elif character in "$`":
                value, index = self._substituted(raw, index, file)
                is_no_word = is_quoted and value == []
                pieces = [value] if isinstance(value, str) else value
                if isinstance(value, str) and not is_quoted:
                    pieces = value.split()
                    if value[:1].isspace() and current is not None:
                        words.append(current)
                        current = None
                if pieces:
                    current = (current or "") + pieces[0]
                for piece in pieces[1:]:
                    words.append(current or "")
                    current = piece
            else:
                current = (current or "") + character
                index += 1

        return words if current is None else [*words, current]

    def _substituted(self, raw: str, start: int, file: Path | None) -> tuple[str | list[str], int]:
        """Return what stands at `$` or a backquote, and where the rest begins."""
        if self._depth == _DEEPEST:
            raise ValueError(f"{self._file}: more than {_DEEPEST} substitutions are nested in each other")
        self._depth += 1
        value, end = self._replaced(raw, start, file)
        self._depth -= 1
        self._count(len(value) if isinstance(value, str) else sum(len(item) + 1 for item in value))
        return value, end

    def _count(self, num_characters: int) -> None:
        """Count characters of replaced values. Variables that double each other would have no end."""
        self._num_characters += num_characters
        if self._num_characters > MOST_CHARACTERS:
            raise ValueError(
                f"{self._file}: its variables expand to more than {MOST_CHARACTERS:,} characters; "
                "give a file with the values themselves"
            )

    def _replaced(self, raw: str, start: int, file: Path | None) -> tuple[str | list[str], int]:
        if raw[start] == "`":
            end = raw.find("`", start + 1)
            return self._output(raw[start + 1 : end], file), (len(raw) if end < 0 else end + 1)
        if raw.startswith("$((", start):
            end = closing(raw, start + 1)
            return self._computed(raw[start + 3 : end - 2]), end
        if raw.startswith("$(", start):
            end = closing(raw, start + 1)
            return self._output(raw[start + 2 : end - 1], file), end
        if raw.startswith("${", start):
            end = closing(raw, start + 1)
            return self._parameter(raw[start + 2 : end - 1], file), end
        if name := _NAME.match(raw, start + 1) or re.compile(r"[0-9@*#?$!-]").match(raw, start + 1):
            return self._parameter(name.group(), file), name.end()
        return "$", start + 1

    def _output(self, command: str, file: Path | None) -> str:
        """Return the output of a command: the script's folder where that is asked for."""
        pipeline = [
            [each for word in words for each in self._expanded(word, file)]
            for _, words in split_commands(command)
        ]
        words = pipeline[0] if len(pipeline) == 1 else []
        if words[:1] == ["seq"] and len(words) in (2, 3, 4) and all(word.isdigit() for word in words[1:]):
            numbers = [int(word) for word in words[1:]]
            first, last = (numbers[0], numbers[-1]) if len(numbers) > 1 else (1, numbers[0])
            step = numbers[1] if len(numbers) == 3 else 1
            return " ".join(map(str, range(first, last + 1, max(1, step))[:_MOST_NUMBERS]))
        if words[:1] == ["echo"]:
            return " ".join(words[1:])
        if words[:1] == ["basename"] and len(words) in (2, 3):
            return Path(words[1]).name.removesuffix(words[2] if len(words) == 3 else "")
        if file is not None and ("BASH_SOURCE" in command or "dirname" in command):
            return str((file.parent / "..").resolve() if "/.." in command else file.parent.resolve())
        try:
            result = printed([each for each in pipeline if each], self._number_of)
        except (ValueError, IndexError):
            return UNKNOWN
        return UNKNOWN if result is None else result

    def _computed(self, expression: str) -> str:
        text = " ".join(self._expanded(f'"{expression}"'))

        try:
            return str(evaluate(re.sub(r"(?<!/)/(?!/)", "//", text), self._number_of))
        except ValueError:
            return UNKNOWN

    def _number_of(self, name: str) -> int:
        """Return the value of a variable in arithmetic."""
        value = self._variables.get(name)
        self._count(_LOOK_UP)
        if not isinstance(value, str):
            raise ValueError(f"{name} is not set")
        return int(evaluate(value.replace("/", "//"), self._number_of))

    def _parameter(self, inner: str, file: Path | None) -> str | list[str]:
        """Return the value of `${...}`."""
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return UNKNOWN
        counts, name, index, change = match.groups()
        self._read_names.add(name)
        value = self._variables.get(name)
        if name in "@*":
            # The arguments, also from one on, as in `${@:2}`.
            return "0" if counts else ["$@"]
        if name == "BASH_SOURCE" and file is not None:
            value = str(file)
        if counts and not change:
            return str(len(value)) if value is not None else "0"

        operators = re.match(r":?[-=+?]|//?|%%?|##?|\^\^?|,,?", change)
        sign = operators.group() if operators else ""
        word = change[len(sign) :]
        if sign[-1:] in ("-", "="):
            usual = " ".join(self._expanded(f'"{word}"' if _is_bare(word) else word, file))
            if value is None or (not value and sign.startswith(":")):
                return usual
        if sign[-1:] == "+":
            return " ".join(self._expanded(word, file)) if value else ""
        if value is None and index in ("[@]", "[*]"):
            return [f"${{{name}[@]}}"]
        if value is None:
            return (
                ""
                if name.isdigit() and name != "0"
                else f"${{oc.env:{name}}}"
                if _NAME.match(name)
                else UNKNOWN
            )
        if isinstance(value, list):
            if index in ("[@]", "[*]"):
                return value
            at = index[1:-1] if index else "0"
            return value[int(at)] if at.isdigit() and int(at) < len(value) else ""
        return _changed(value, sign, " ".join(self._expanded(word, file)))


def _changed(value: str, sign: str, word: str) -> str:
    """Return a text with a part removed or replaced, as `${NAME%pattern}` does."""
    if sign in ("/", "//"):
        old, _, new = word.partition("/")
        return value.replace(old, new) if sign == "//" else value.replace(old, new, 1)
    if sign in ("%", "%%", "#", "##"):
        ends = range(len(value), -1, -1) if sign in ("%", "##") else range(len(value) + 1)
        for end in ends:
            cut = value[end:] if sign.startswith("%") else value[:end]
            if fnmatch.fnmatchcase(cut, word):
                return value[:end] if sign.startswith("%") else value[end:]
    changes = {"^^": str.upper, ",,": str.lower}
    return changes[sign](value) if sign in changes else value


def _joined(one: bool | None, separator: str, other: bool | None) -> bool | None:
    """Return whether two tests hold together; None if that cannot be known."""
    decisive = separator == "||"
    if decisive in (one, other):
        return decisive
    return None if None in (one, other) else not decisive


def _is_bare(text: str) -> bool:
    return '"' not in text and "'" not in text


# ---- commands and their words, as they are written

_PAIRS = {"(": ")", "{": "}"}


def closing(text: str, opening: int) -> int:
    """Return the end of the part in brackets that begins at `opening`."""
    close = _PAIRS[text[opening]]
    depth = 0
    index = opening
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif character == "'" and close == ")":
            index = max(index, text.find("'", index + 1))
        elif character == text[opening]:
            depth += 1
        elif character == close:
            depth -= 1
            if depth == 0:
                return index + 1
        index += 1
    return len(text)


def split_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command as written, with the separator before it."""
    separator = "\n"
    words: list[str] = []
    start: int | None = None
    index = 0

    def ends_word(end: int) -> None:
        nonlocal start
        if start is not None:
            words.append(re.sub(r"\\[ \t]*\n", "", text[start:end]))
        start = None

    while index < len(text):
        character = text[index]
        if continued := re.compile(r"\\[ \t]*\n").match(text, index):
            ends_word(index)
            index = continued.end()
        elif character == "#" and start is None:
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
        elif character in " \t\r":
            ends_word(index)
            index += 1
        elif character in "\n;&|)" and not (character == "&" and text[index - 1 : index] in (">", "<")):
            ends_word(index)
            if words:
                yield separator, words
                words = []
            separator = text[index : index + 2] if text[index : index + 2] in ("&&", "||") else character
            index += len(separator)
        elif character == "(" and start is None:
            index += 1
        else:
            start = index if start is None else start
            index = _part_end(text, index)
    ends_word(index)
    if words:
        yield separator, words


def _part_end(text: str, index: int) -> int:
    """Return the end of a quoted or bracketed part of a word, or of one character."""
    character = text[index]
    if character == "'":
        end = text.find("'", index + 1)
        return len(text) if end < 0 else end + 1
    if character == '"':
        index += 1
        while index < len(text) and text[index] != '"':
            index = _part_end(text, index) if text[index] in "$\\`" else index + 1
        return index + 1
    if character == "`":
        end = text.find("`", index + 1)
        return len(text) if end < 0 else end + 1
    if character == "\\":
        return index + 2
    if character == "$" and text[index + 1 : index + 2] in ("(", "{"):
        return closing(text, index + 1)
    if character == "(" and text[index - 1] == "=":
        return _array_end(text, index)
    return index + 1


def _array_end(text: str, index: int) -> int:
    """Return the end of an array, in which comments may have brackets and quotes."""
    index += 1
    while index < len(text) and text[index] != ")":
        if text[index] == "#" and text[index - 1].isspace():
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
        else:
            index = _part_end(text, index)
    return index + 1
