"""Static reader of shell scripts: the words of each command, as far as they are known without running anything.

Follows assignments, defaults (`${X:-y}`), arithmetic, arrays, continuations, functions with arguments, and both arms
of conditions. What depends on the outside (an unset variable, a command's output, an argument of the script) becomes a
hole that carries its name. Substitutions of commands are never run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hone.dialects.foreign import hole
from hone.dialects.shell_expansion import MAX_CHARS, MAX_DEPTH, NAME, ShellScope, Variables, expand
from hone.dialects.shell_words import ShellToken, tokens_of

MAX_COMMANDS = 2_000

_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.DOTALL)
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_ENDS = ("then", "else", "elif", "fi", "do", "done", "esac", "}", ")")
_NO_PROGRAMS = ("set", "shift", "unset", "echo", "printf", "source", ".", "cd", "read", "trap", "exit", "return")


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A simple command with its words expanded."""

    words: tuple[str, ...]
    line: int
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the script exported before it, and those written in front of it."""
    is_background: bool = False
    """Followed by `&`."""


def read_script(text: str) -> list[ShellCommand]:
    """Commands of a script in order; functions where they are called, both arms of a condition, loops once."""
    reader = _ScriptReader(list(tokens_of(text)))
    scope = ShellScope({})
    while reader.at < len(reader.tokens):
        before = reader.at
        reader.sequence(scope, 0)
        if reader.at == before or reader.at < len(reader.tokens):
            reader.at += 1  # a stray `done` or `)`: the rest is still read
    return reader.commands


class _ScriptReader:
    """Reads tokens and expands as it goes."""

    def __init__(self, tokens: list[ShellToken]) -> None:
        self.tokens = tokens
        self.at = 0
        self.commands: list[ShellCommand] = []
        self.functions: dict[str, list[ShellToken]] = {}

    def sequence(self, scope: ShellScope, depth: int, ends: tuple[str, ...] = _ENDS) -> None:
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

    def _command(self, scope: ShellScope, depth: int) -> None:
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

    def _if(self, scope: ShellScope, depth: int) -> None:
        """Every arm is read; a variable that they leave with different values is unknown."""
        results: list[Variables] = []
        has_else = False
        while (token := self._peek()) is not None and token.text in ("if", "elif", "else"):
            self.at += 1
            arm = ShellScope(dict(scope.variables), scope.exported, scope.arguments)
            if token.text != "else":
                self.sequence(arm, depth + 1, ("then",))
                self._take("then")
            else:
                has_else = True
            self.sequence(arm, depth + 1, ("elif", "else", "fi"))
            results.append(arm.variables)
        self._take("fi")
        _merge(scope.variables, results if has_else else [dict(scope.variables), *results])

    def _case(self, scope: ShellScope, depth: int) -> None:
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
            arm = ShellScope(dict(scope.variables), scope.exported, scope.arguments)
            self.sequence(arm, depth + 1, ("esac",))
            results.append(arm.variables)
            while (token := self._peek()) is not None and (token.kind == "newline" or token.text == ";;"):
                self.at += 1
        self._take("esac")
        _merge(scope.variables, results)

    def _for(self, scope: ShellScope, depth: int) -> None:
        self.at += 1
        name = self.tokens[self.at].text if self._peek() else ""
        values: list[str] = []
        while (token := self._peek()) is not None and token.text != "do":
            if token.kind == "word" and token.text not in (name, "in"):
                values += expand(token.text, scope)
            self.at += 1
        if NAME.fullmatch(name):
            scope.variables[name] = values[0] if len(values) == 1 else hole(f"{name} of a loop")
        self._body(scope, depth)

    def _body(self, scope: ShellScope, depth: int) -> None:
        self._take("do")
        self.sequence(scope, depth + 1, ("done",))
        self._take("done")

    def _is_function(self) -> bool:
        texts = [token.text for token in self.tokens[self.at : self.at + 3]]
        return texts[:1] == ["function"] or (texts[1:3] == ["(", ")"] and bool(NAME.match(texts[0])))

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

    def _simple(self, scope: ShellScope, depth: int) -> None:
        line = self.tokens[self.at].line
        raw: list[str] = []
        while (token := self._peek()) is not None and token.kind == "word":
            raw.append(token.text)
            self.at += 1
            while (token := self._peek()) is not None and token.text in ("<", ">", ">>", "&>", ">&", ">|"):
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
        words = [word for text in raw for word in expand(text, scope)]
        if not words:
            return
        if words[0] in _NO_PROGRAMS:
            _forget(words, scope)
            return
        if words[0] in self.functions and depth < MAX_DEPTH:
            self._call(words, scope, depth)
            return
        environment = tuple({**scope.exported, **dict(assigned)}.items())
        is_background = (token := self._peek()) is not None and token.text == "&"
        self.commands.append(ShellCommand(tuple(words), line, environment, is_background))

    def _call(self, words: list[str], scope: ShellScope, depth: int) -> None:
        inner = _ScriptReader(self.functions[words[0]])
        inner.functions, inner.commands = self.functions, self.commands
        inner.sequence(ShellScope(scope.variables, scope.exported, words[1:]), depth + 1, ())

    def _declare(self, raw: list[str], scope: ShellScope) -> None:
        for text in raw[1:]:
            if found := _ASSIGN.match(text):
                name = self._assign(text, found, scope)
            elif NAME.fullmatch(text):
                name = text
            else:
                continue
            value = scope.variables.get(name)
            if raw[0] == "export" and isinstance(value, str):
                scope.exported[name] = value

    def _assign(self, text: str, found: re.Match[str], scope: ShellScope) -> str:
        name, index, plus = found[1], found[2], found[3]
        rest = text[found.end() :]
        old = scope.variables.get(name)
        if index:
            scope.variables[name] = hole(name)
        elif rest.startswith("("):
            inner = [token for token in tokens_of(rest[1:-1]) if token.kind == "word"]
            items = [word for token in inner for word in expand(token.text, scope)]
            known = old if isinstance(old, list) else [] if old is None else [old]
            scope.variables[name] = (known + items if plus else items)[:MAX_COMMANDS]
        else:
            value = "".join(expand(rest, scope, splits=False))
            if plus and isinstance(old, list):
                scope.variables[name] = [*old, value]
            else:
                scope.variables[name] = ((old if plus and isinstance(old, str) else "") + value)[:MAX_CHARS]
        return name


def _merge(into: Variables, results: list[Variables]) -> None:
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result.get(name) for result in results]
        if all(value == values[0] for value in values) and values[0] is not None:
            into[name] = values[0]
        else:
            into[name] = hole(f"{name}, which depends on a condition")


def _forget(words: list[str], scope: ShellScope) -> None:
    if words[0] in ("unset", "read"):
        for name in words[1:]:
            if words[0] == "unset":
                scope.variables.pop(name, None)
            else:
                scope.variables[name] = hole(name)
    elif words[0] == "shift" and scope.arguments:
        del scope.arguments[: int(words[1]) if len(words) > 1 and words[1].isdecimal() else 1]
