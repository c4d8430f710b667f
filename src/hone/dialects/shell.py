"""Static reader of shell scripts: the words of each command, as far as they are known without running anything.

Follows assignments, defaults (`${X:-y}`), arithmetic, arrays, continuations, functions with arguments, and both arms
of conditions. What depends on the outside (an unset variable, a command's output, an argument of the script) becomes a
hole that carries its name. Substitutions of commands are never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from hone.dialects.foreign import hole, holes_in

MAX_COMMANDS = 2_000
MAX_DEPTH = 12
MAX_CHARS = 1_000_000
"""Of a value: a script that doubles a variable in each line stops there."""

_BLANK = re.compile(r"\s")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.DOTALL)
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_OPERATORS = ("&&", "||", ";;", "<<<", "<<-", "<<", ">>", "&>", ">&", ">|", "|&", ";", "|", "&", "(", ")", "<", ">")
_ENDS = ("then", "else", "elif", "fi", "do", "done", "esac", "}", ")")


@dataclass(frozen=True, slots=True)
class ShellToken:
    """A word as it is written, an operator, or the end of a line."""

    kind: str
    """word, operator, newline."""
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A simple command with its words expanded."""

    words: tuple[str, ...]
    line: int
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the script exported before it, and those written in front of it."""


Variables = dict[str, "str | list[str]"]


@dataclass
class _Scope:
    variables: Variables
    exported: dict[str, str] = field(default_factory=dict)
    arguments: list[str] | None = None
    """Positional arguments; None: those of the script, which are unknown."""


def read_script(text: str) -> list[ShellCommand]:
    """Commands of a script in order; functions where they are called, both arms of a condition, loops once."""
    reader = _ScriptReader(list(_tokens(text)))
    scope = _Scope({})
    while reader.at < len(reader.tokens):
        before = reader.at
        reader.sequence(scope, 0)
        if reader.at == before or reader.at < len(reader.tokens):
            reader.at += 1  # a stray `done` or `)`: the rest is still read
    return reader.commands


# ---- tokens


def _tokens(text: str) -> Iterator[ShellToken]:
    at, line, length = 0, 1, len(text)
    pending: list[str] = []
    while at < length:
        char = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif text.startswith("\\\r\n", at):
            at, line = at + 3, line + 1
        elif char == "\n":
            yield ShellToken("newline", "\n", line)
            at, line = at + 1, line + 1
            for delimiter in pending:
                at, line = _skip_document(text, at, line, delimiter)
            pending = []
        elif char.isspace():
            at += 1
        elif char == "#":
            at = _end_of_line(text, at)
        elif operator := next((known for known in _OPERATORS if text.startswith(known, at)), None):
            at += len(operator)
            if operator in ("<<", "<<-"):
                end, _ = _word_end(text, _skip_blanks(text, at))
                pending.append(text[_skip_blanks(text, at) : end].strip("'\"\\"))
                at = end
            elif operator not in ("<<<",):
                yield ShellToken("operator", operator, line)
        else:
            end, lines = _word_end(text, at)
            end = max(end, at + 1)
            yield ShellToken("word", text[at:end], line)
            at, line = end, line + lines


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t":
        at += 1
    return at


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _skip_document(text: str, at: int, line: int, delimiter: str) -> tuple[int, int]:
    while at < len(text):
        end = _end_of_line(text, at)
        is_last = text[at:end].strip() == delimiter
        at, line = min(end + 1, len(text)), line + 1
        if is_last:
            break
    return at, line


def _word_end(text: str, at: int) -> tuple[int, int]:
    """Where the word that starts here ends, and the line breaks within it."""
    start = at
    while at < len(text):
        char = text[at]
        if char == "\\":
            if text.startswith("\\\n", at) and (at + 2 >= len(text) or text[at + 2].isspace()):
                break
            at += 2
        elif char in "'\"`":
            at = _quoted_end(text, at)
        elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = _bracket_end(text, at + 1)
        elif char == "(" and text[at - 1 : at] == "=" and at > start:
            at = _bracket_end(text, at)
        elif char == "{" or char == "}":
            at += 1
        elif char.isspace() or char in ";|&()<>":
            break
        else:
            at += 1
    at = min(at, len(text))
    return at, text.count("\n", start, at)


def _quoted_end(text: str, at: int) -> int:
    """After the quote that closes the one at `at`; where none does, at the end of the line."""
    quote, start = text[at], at
    at += 1
    while at < len(text) and text[at] != quote:
        if quote != "'" and text[at] == "\\":
            at += 1
        elif quote == '"' and text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = _bracket_end(text, at + 1) - 1
        at += 1
    return at + 1 if at < len(text) else max(_end_of_line(text, start), start + 1)


def _bracket_end(text: str, at: int) -> int:
    """After the bracket that closes the one at `at`; where none does, at the end of the word."""
    opening, start = text[at], at
    closing = {"(": ")", "{": "}", "[": "]"}[opening]
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "'\"`":
            at = _quoted_end(text, at) - 1
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    blank = _BLANK.search(text, start)
    return blank.start() if blank else len(text)


# ---- commands


class _ScriptReader:
    """Reads tokens and expands as it goes."""

    def __init__(self, tokens: list[ShellToken]) -> None:
        self.tokens = tokens
        self.at = 0
        self.commands: list[ShellCommand] = []
        self.functions: dict[str, list[ShellToken]] = {}

    def sequence(self, scope: _Scope, depth: int, ends: tuple[str, ...] = _ENDS) -> None:
        """Commands up to a word that closes something, which is left."""
        while (token := self._peek()) is not None:
            if token.kind == "newline" or token.text in (";", ";;", "&", "&&", "||", "|", "|&", "!"):
                if token.text == ";;" and "esac" in ends:
                    return
                self.at += 1
            elif token.text in ends or token.text == ")":
                return
            else:
                before = self.at
                self._command(scope, depth)
                if self.at == before:
                    self.at += 1

    def _peek(self) -> ShellToken | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _take(self, text: str) -> bool:
        while (token := self._peek()) is not None and token.kind == "newline":
            self.at += 1
        if token is not None and token.text == text:
            self.at += 1
            return True
        return False

    def _command(self, scope: _Scope, depth: int) -> None:
        token = self.tokens[self.at]
        word = token.text
        if depth > MAX_DEPTH or len(self.commands) > MAX_COMMANDS:
            self.at = len(self.tokens)
        elif word == "if":
            self._if(scope, depth)
        elif word in ("while", "until"):
            self.at += 1
            self.sequence(scope, depth + 1, ("do",))
            self._body(scope, depth)
        elif word == "for":
            self._for(scope, depth)
        elif word == "case":
            self._case(scope, depth)
        elif word in ("(", "{"):
            self.at += 1
            self.sequence(scope, depth + 1, (")" if word == "(" else "}",))
            self.at += 1
        elif word == "[[" or word.startswith("(("):
            self._skip_line()
        elif self._is_function():
            self._function()
        else:
            self._simple(scope, depth)

    def _skip_line(self) -> None:
        while (token := self._peek()) is not None and token.kind != "newline" and token.text not in (";", "&&", "||"):
            self.at += 1

    def _if(self, scope: _Scope, depth: int) -> None:
        """Every arm is read; a variable that they leave with different values is unknown."""
        results: list[Variables] = []
        has_else = False
        while (token := self._peek()) is not None and token.text in ("if", "elif", "else"):
            self.at += 1
            arm = _Scope(dict(scope.variables), scope.exported, scope.arguments)
            if token.text != "else":
                self.sequence(arm, depth + 1, ("then",))
                self._take("then")
            else:
                has_else = True
            self.sequence(arm, depth + 1, ("elif", "else", "fi"))
            results.append(arm.variables)
        self._take("fi")
        _merge(scope.variables, results if has_else else [dict(scope.variables), *results])

    def _case(self, scope: _Scope, depth: int) -> None:
        results = [dict(scope.variables)]
        while (token := self._peek()) is not None and token.text not in ("in", ";"):
            self.at += 1
        self.at += 1
        while (token := self._peek()) is not None and token.text != "esac":
            while (token := self._peek()) is not None and token.text not in (")", "esac"):
                self.at += 1
            if token is None or token.text == "esac":
                break
            self.at += 1
            arm = _Scope(dict(scope.variables), scope.exported, scope.arguments)
            self.sequence(arm, depth + 1, ("esac",))
            results.append(arm.variables)
            while (token := self._peek()) is not None and (token.kind == "newline" or token.text == ";;"):
                self.at += 1
        self._take("esac")
        _merge(scope.variables, results)

    def _for(self, scope: _Scope, depth: int) -> None:
        self.at += 1
        name = self.tokens[self.at].text if self._peek() else ""
        values: list[str] = []
        while (token := self._peek()) is not None and token.text != "do":
            if token.kind == "word" and token.text not in (name, "in"):
                values += self._expand(token.text, scope)
            self.at += 1
        if _NAME.fullmatch(name):
            scope.variables[name] = values[0] if len(values) == 1 else hole(f"{name} of a loop")
        self._body(scope, depth)

    def _body(self, scope: _Scope, depth: int) -> None:
        self._take("do")
        self.sequence(scope, depth + 1, ("done",))
        self._take("done")

    def _is_function(self) -> bool:
        texts = [token.text for token in self.tokens[self.at : self.at + 3]]
        return texts[:1] == ["function"] or (texts[1:3] == ["(", ")"] and bool(_NAME.match(texts[0])))

    def _function(self) -> None:
        if self.tokens[self.at].text == "function":
            self.at += 1
        name = self.tokens[self.at].text.removesuffix("()") if self._peek() else ""
        self.at += 1
        while (token := self._peek()) is not None and token.text not in ("{",):
            if token.kind == "word":
                return
            self.at += 1
        start, depth = self.at + 1, 0
        while (token := self._peek()) is not None:
            depth += (token.text == "{") - (token.text == "}")
            self.at += 1
            if depth == 0:
                break
        self.functions[name] = self.tokens[start : self.at - 1]

    def _simple(self, scope: _Scope, depth: int) -> None:
        line = self.tokens[self.at].line
        raw: list[str] = []
        while (token := self._peek()) is not None and token.kind == "word":
            raw.append(token.text)
            self.at += 1
            while (token := self._peek()) is not None and token.text in ("<", ">", ">>", "&>", ">&", ">|"):
                if raw and raw[-1].isdecimal():
                    raw.pop()
                self.at += 2  # with the file's name
        if not raw:
            return
        assigned: list[tuple[str, str]] = []
        while raw and (found := _ASSIGN.match(raw[0])):
            name = self._assign(raw.pop(0), found, scope)
            value = scope.variables.get(name, "")
            assigned.append((name, value if isinstance(value, str) else " ".join(value)))
        if not raw:
            return
        if raw[0] in _DECLARES:
            self._declare(raw, scope)
            return
        words = [word for text in raw for word in self._expand(text, scope)]
        if not words:
            return
        if words[0] in (
            "set",
            "shift",
            "unset",
            "echo",
            "printf",
            "source",
            ".",
            "cd",
            "read",
            "trap",
            "exit",
            "return",
        ):
            _forget(words, scope)
            return
        if words[0] in self.functions and depth < MAX_DEPTH:
            self._call(words, scope, depth)
            return
        environment = tuple({**scope.exported, **dict(assigned)}.items())
        self.commands.append(ShellCommand(tuple(words), line, environment))

    def _call(self, words: list[str], scope: _Scope, depth: int) -> None:
        inner = _ScriptReader(self.functions[words[0]])
        inner.functions, inner.commands = self.functions, self.commands
        inner.sequence(_Scope(scope.variables, scope.exported, words[1:]), depth + 1, ())

    def _declare(self, raw: list[str], scope: _Scope) -> None:
        for text in raw[1:]:
            if found := _ASSIGN.match(text):
                name = self._assign(text, found, scope)
            elif _NAME.fullmatch(text):
                name = text
            else:
                continue
            value = scope.variables.get(name)
            if raw[0] == "export" and isinstance(value, str):
                scope.exported[name] = value

    def _assign(self, text: str, found: re.Match[str], scope: _Scope) -> str:
        name, index, plus = found[1], found[2], found[3]
        rest = text[found.end() :]
        old = scope.variables.get(name)
        if index:
            scope.variables[name] = hole(name)
        elif rest.startswith("("):
            inner = [token for token in _tokens(rest[1:-1]) if token.kind == "word"]
            items = [word for token in inner for word in self._expand(token.text, scope)]
            known = old if isinstance(old, list) else [] if old is None else [old]
            scope.variables[name] = (known + items if plus else items)[:MAX_COMMANDS]
        else:
            value = "".join(self._expand(rest, scope, splits=False))
            if plus and isinstance(old, list):
                scope.variables[name] = [*old, value]
            else:
                scope.variables[name] = ((old if plus and isinstance(old, str) else "") + value)[:MAX_CHARS]
        return name

    # ---- expansion

    def _expand(self, raw: str, scope: _Scope, *, splits: bool = True) -> list[str]:
        """A word as written -> the words that it becomes."""
        words, current, started = [], "", False
        for text, is_quoted, is_list in _pieces(raw, scope):
            if is_list is not None:
                items = is_list if is_quoted else [part for item in is_list for part in item.split()]
                if not splits:
                    current, started = current + " ".join(items), True
                elif items:
                    current += items[0]
                    for item in items[1:]:
                        words.append(current)
                        current = item
                    started = True
            elif is_quoted or not splits:
                current, started = current + text, True
            else:
                parts = _split(text)
                for number, part in enumerate(parts):
                    if number:
                        if started or current:
                            words.append(current)
                        current, started = "", False
                    current += part
                    started = started or bool(part)
        if started or current:
            words.append(current)
        return [word[:MAX_CHARS] for word in words]


def _split(text: str) -> list[str]:
    """By white space outside of holes; a leading or trailing blank gives an empty part."""
    if not holes_in_text(text):
        return re.split(r"\s+", text)
    return re.split(r"\s+(?![^\ue000]*\ue001)", text)


def holes_in_text(text: str) -> bool:
    return next(holes_in(text), None) is not None


def _merge(into: Variables, results: list[Variables]) -> None:
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result.get(name) for result in results]
        if all(value == values[0] for value in values) and values[0] is not None:
            into[name] = values[0]
        else:
            into[name] = hole(f"{name}, which depends on a condition")


def _forget(words: list[str], scope: _Scope) -> None:
    if words[0] in ("unset", "read"):
        for name in words[1:]:
            if words[0] == "unset":
                scope.variables.pop(name, None)
            else:
                scope.variables[name] = hole(name)
    elif words[0] == "shift" and scope.arguments:
        del scope.arguments[: int(words[1]) if len(words) > 1 and words[1].isdecimal() else 1]


Piece = tuple[str, bool, "list[str] | None"]


def _pieces(raw: str, scope: _Scope, depth: int = 0) -> Iterator[Piece]:
    """Parts of a word: text, whether it was quoted, and the items of an array."""
    at = 0
    while at < len(raw):
        char = raw[at]
        if char == "\\":
            if raw[at + 1 : at + 2] != "\n":
                yield raw[at + 1 : at + 2], True, None
            at += 2
        elif char == "'":
            end = _quoted_end(raw, at)
            yield raw[at + 1 : end - 1] if raw[end - 1 : end] == "'" and end > at + 1 else raw[at + 1 : end], True, None
            at = end
        elif char == '"':
            end = _quoted_end(raw, at)
            inner = raw[at + 1 : end - 1] if end > at + 1 and raw[end - 1] == '"' else raw[at + 1 : end]
            yield "", True, None
            for text, items in _in_quotes(inner, scope, depth):
                yield text, True, items
            at = end
        elif char == "`":
            end = _quoted_end(raw, at)
            yield hole(raw[at + 1 : end - 1]), True, None
            at = end
        elif char == "$":
            text, items, at = _dollar(raw, at, scope, depth)
            yield text, raw[at - 1 : at] == ")", items
        elif char == "~" and at == 0 and raw[1:2] in ("", "/"):
            yield "~", True, None
            at += 1
        else:
            end = at
            while end < len(raw) and raw[end] not in "\\'\"`$":
                end += 1
            end = max(end, at + 1)
            yield raw[at:end], True, None
            at = end


def _in_quotes(text: str, scope: _Scope, depth: int) -> Iterator[tuple[str, list[str] | None]]:
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
            if text[at + 1] != "\n":
                yield text[at + 1], None
            at += 2
        elif char == "`":
            end = _quoted_end(text, at)
            yield hole(text[at + 1 : end - 1]), None
            at = end
        elif char == "$":
            found, items, at = _dollar(text, at, scope, depth)
            yield found, items
        else:
            end = at + 1
            while end < len(text) and text[end] not in "\\`$":
                end += 1
            yield text[at:end], None
            at = end


def _dollar(text: str, at: int, scope: _Scope, depth: int) -> tuple[str, list[str] | None, int]:
    """What an expansion at `at` gives: text or items, and where it ends."""
    if text.startswith("$((", at):
        end = _bracket_end(text, at + 1)
        return _arithmetic(text[at + 3 : end - 2], scope, depth), None, end
    if text.startswith("$(", at):
        end = _bracket_end(text, at + 1)
        command = text[at + 2 : end - 1].strip()
        return "." if command == "pwd" else hole(f"$({' '.join(command.split())})"), None, end
    if text.startswith("${", at):
        end = _bracket_end(text, at + 1)
        found, items = _braces(text[at + 2 : end - 1], scope, depth)
        return found, items, end
    if name := _NAME.match(text, at + 1):
        found, items = _variable(name[0], scope)
        return found, items, name.end()
    special = text[at + 1 : at + 2]
    if special and special in "@*#?$!-0123456789":
        found, items = _special(special, scope)
        return found, items, at + 2
    return "$", None, at + 1


def _special(name: str, scope: _Scope) -> tuple[str, list[str] | None]:
    if name in "@*":
        return "", list(scope.arguments or [])
    if name.isdecimal() and name != "0" and scope.arguments is not None:
        number = int(name)
        return (scope.arguments[number - 1] if number <= len(scope.arguments) else ""), None
    return hole(f"${name}"), None


def _variable(name: str, scope: _Scope) -> tuple[str, list[str] | None]:
    value = scope.variables.get(name)
    if value is None:
        return {"HOME": "~", "PWD": "."}.get(name) or hole(f"${name}"), None
    if isinstance(value, list):
        return value[0] if value else "", None
    return value, None


_BRACES = re.compile(r"([A-Za-z_]\w*|[0-9@*])(\[[^\]]*\])?(.*)", re.DOTALL)


def _braces(inner: str, scope: _Scope, depth: int) -> tuple[str, list[str] | None]:
    """`${...}`: a variable, its default, an array."""
    found = _BRACES.fullmatch(inner)
    if found is None or depth > MAX_DEPTH:
        return hole(f"${{{inner}}}"), None
    name, index, rest = found[1], found[2], found[3]
    is_special = not (name[0].isalpha() or name[0] == "_")
    is_set = name in scope.variables or (is_special and bool(scope.arguments))
    if index in ("[@]", "[*]") and not rest:
        value = scope.variables.get(name, [])
        return ("", value) if isinstance(value, list) else ("", [value])
    if index or (rest and rest[0] not in ":-=?+"):
        return hole(f"${{{inner}}}"), None
    plain, items = _special(name, scope) if is_special else _variable(name, scope)
    if not rest:
        return plain, items
    if (operator := re.match(r":?[-=?+]", rest)) is None:
        return hole(f"${{{inner}}}"), None
    other = "".join(
        text if listed is None else " ".join(listed)
        for text, _, listed in _pieces(rest[operator.end() :], scope, depth + 1)
    )
    kind = operator[0][-1]
    lacks = not is_set or (operator[0][0] == ":" and plain == "" and not items)
    if kind == "+":
        return ("" if lacks else other), None
    if not lacks:
        return plain, items
    if kind == "?":
        return hole(f"${name}"), None
    if kind == "=" and not is_special:
        scope.variables[name] = other
    return other, None


# ---- arithmetic


_ALLOWED = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)


def _arithmetic(text: str, scope: _Scope, depth: int) -> str:
    """Value of `$((...))`, or a hole where it names something unknown."""
    plain = "".join(piece if items is None else " ".join(items) for piece, _, items in _pieces(text, scope, depth + 1))
    named = _NAME.sub(lambda name: _variable(name[0], scope)[0] if not holes_in_text(plain) else name[0], plain)
    if holes_in_text(named) or len(named) > 500:
        return hole(f"$(({' '.join(text.split())}))")
    try:
        tree = ast.parse(named.strip().lstrip("0 ") or "0", mode="eval")
        return str(_number(tree.body, 0))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return hole(f"$(({' '.join(text.split())}))")


def _number(node: ast.expr, depth: int) -> int:
    if depth > 50:
        raise ValueError("too deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ALLOWED):
        left, right = _number(node.left, depth + 1), _number(node.right, depth + 1)
        if isinstance(node.op, ast.Add):
            value = left + right
        elif isinstance(node.op, ast.Sub):
            value = left - right
        elif isinstance(node.op, ast.Mult):
            value = left * right
        elif isinstance(node.op, ast.Mod):
            value = abs(left) % abs(right) * (1 if left >= 0 else -1)
        else:
            value = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # the shell rounds to zero
        if abs(value) < 1 << 63:
            return value
    raise ValueError("not arithmetic")
