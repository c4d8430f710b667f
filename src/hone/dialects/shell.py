"""Static reader of shell scripts: the words of each command, as far as they are known without running anything.

Follows assignments, defaults (`${X:-y}`), arithmetic, arrays, continuations, functions with arguments, documents,
commands within `bash -c`, and conditions: the arm that is taken where that is known, else each. A script is read as it
is started without arguments. What depends on the outside (an unset variable, a command's output, an argument of the
script) becomes a hole that carries its name. Substitutions of commands are never run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from hone.dialects.foreign import hole
from hone.dialects.shell_conditions import matched, merge, tested
from hone.dialects.shell_expansion import MAX_CHARS, MAX_DEPTH, NAME, ShellScope, Variables, expand, expand_document
from hone.dialects.shell_words import ShellToken, tokens_of

MAX_COMMANDS = 2_000

_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.DOTALL)
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_TESTS = ("[", "[[", "test")
_LEAVES = ("exit", "return")
_REDIRECTS = ("<", ">", ">>", "&>", "&>>", ">&", ">|")
_SHELLS = re.compile(r"(^|/)(ba|z|da|k)?sh$")
_REMOTE = ("ssh", "tmux", "screen", "su")
_READS_SCRIPTS = (*_REMOTE, "sbatch", "srun", "docker", "kubectl", "sudo", "tee", "cat")
"""With a script as their document; of `cat` and `tee`, where it is written to a file."""
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


def read_script(text: str, path: str | None = None) -> list[ShellCommand]:
    """Commands of a script in order; functions where they are called, both arms of a condition, loops once. `path` is
    where the script is, which `$0` stands for."""
    commands: list[ShellCommand] = []
    _read_all(text, ShellScope({} if path is None else {"0": path, "BASH_SOURCE": [path]}), 0, commands)
    return commands


def _read_all(text: str, scope: ShellScope, depth: int, commands: list[ShellCommand]) -> None:
    reader = _ScriptReader(list(tokens_of(text.replace("\r\n", "\n"))), commands)
    while reader.at < len(reader.tokens):
        before = reader.at
        reader.sequence(scope, depth)
        if reader.at == before or reader.at < len(reader.tokens):
            reader.at += 1  # a stray `done` or `)`: the rest is still read


class _ScriptReader:
    """Reads tokens and expands as it goes."""

    def __init__(self, tokens: list[ShellToken], commands: list[ShellCommand]) -> None:
        self.tokens = tokens
        self.at = 0
        self.commands = commands
        self.functions: dict[str, list[ShellToken]] = {}
        self.leaves = False
        """The arm that is read ends the script."""
        self.is_program = False
        """The last command was a program, whose result is not known."""

    def sequence(self, scope: ShellScope, depth: int, ends: tuple[str, ...] = _ENDS) -> bool | None:
        """Commands up to a word that closes something, which is left. Result of the last; None where not known.

        Before `&&`, a program is taken to succeed.
        """
        result: bool | None = True
        runs: bool | None = True
        while (token := self._peek()) is not None:
            if token.text in ("&&", "||") and token.kind == "operator":
                known = True if self.is_program and token.text == "&&" else result
                runs = None if known is None else known == (token.text == "&&")
                self.at += 1
                self._skip_newlines()
            elif token.kind != "word" and token.text not in ("(", ")"):
                if token.text == ";;" and "esac" in ends:
                    return result
                self.at, runs = self.at + 1, True
            elif token.text in ends or token.text == ")":
                return result
            elif runs is True:
                result = self._one(scope, depth)
            else:
                arm = self._arm(scope, lambda arm: self._one(arm, depth), is_taken=runs)
                merge(scope.variables, [dict(scope.variables), *([] if arm is None else [arm])])
                runs = True
        return result

    def _one(self, scope: ShellScope, depth: int) -> bool | None:
        """A command; at least one token is taken."""
        before, self.is_program = self.at, False
        if self.tokens[self.at].text == "!":
            self.at += 1
            result = self._one(scope, depth) if self._peek() else None
            return None if result is None else not result
        result = self._command(scope, depth)
        if self.at == before:
            self.at += 1
        return result

    def _arm(
        self, scope: ShellScope, read: Callable[[ShellScope], object], is_taken: bool | None = None
    ) -> Variables | None:
        """Read tokens that may not be run; variables after them, None where they are not run or end the script.

        Args:
            is_taken: False: not run, and commands in them are dropped.
        """
        arm = ShellScope(dict(scope.variables), dict(scope.exported), scope.arguments)
        known, before, self.leaves = len(self.commands), self.leaves, False
        functions = dict(self.functions)
        read(arm)
        left, self.leaves = self.leaves, before
        if is_taken is False:
            del self.commands[known:]
            self.functions = functions
        return None if left or is_taken is False else arm.variables

    def _peek(self) -> ShellToken | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _skip_newlines(self) -> None:
        while (token := self._peek()) is not None and token.kind == "newline":
            self.at += 1

    def _take(self, text: str) -> bool:
        self._skip_newlines()
        token = self._peek()
        if token is not None and token.text == text:
            self.at += 1
            return True
        return False

    def _command(self, scope: ShellScope, depth: int) -> bool | None:
        word = self.tokens[self.at].text
        following = [token.text for token in self.tokens[self.at + 1 : self.at + 3]]
        if depth > MAX_DEPTH or len(self.commands) > MAX_COMMANDS:
            self.at = len(self.tokens)
        elif word == "if":
            self._if(scope, depth)
        elif word in ("while", "until"):
            self._while(scope, depth)
        elif word == "for":
            self._for(scope, depth)
        elif word == "case":
            self._case(scope, depth)
        elif word in ("(", "{"):
            self.at += 1
            result = self.sequence(scope, depth + 1, (")" if word == "(" else "}",))
            self.at += 1
            return result
        elif word in _TESTS:
            return self._test(scope)
        elif word.startswith("(("):
            while (token := self._peek()) and token.kind != "newline" and token.text not in (";", "&&", "||"):
                self.at += 1
            return None
        elif word == "function" or (following == ["(", ")"] and NAME.match(word)):
            self._function()
        else:
            return self._simple(scope, depth)
        return True

    def _test(self, scope: ShellScope) -> bool | None:
        """`[ ... ]`, `[[ ... ]]` or `test ...`."""
        closing = {"[": "]", "[[": "]]"}.get(self.tokens[self.at].text)
        self.at += 1
        words: list[str] = []
        is_known = True
        while (token := self._peek()) is not None and token.kind != "newline" and token.text != closing:
            if closing != "]]" and token.kind == "operator":
                break
            is_known = is_known and token.text not in ("<", ">", "(", ")", "=~")
            words.append(token.text if token.kind == "operator" else "".join(expand(token.text, scope, splits=False)))
            self.at += 1
        if closing is not None and (token := self._peek()) is not None and token.text == closing:
            self.at += 1
        return tested(words) if is_known else None

    def _if(self, scope: ShellScope, depth: int) -> None:
        """The arm that is taken, where that is known; else each, and what they leave differently is unknown."""
        results: list[Variables] = []
        is_open = True
        """Whether a later arm may be the one."""
        while (token := self._peek()) is not None and token.text in ("if", "elif", "else"):
            self.at += 1
            taken: bool | None = True
            if token.text != "else":
                taken = self.sequence(scope, depth + 1, ("then",))
                self._take("then")
            body = self._arm(
                scope,
                lambda arm: self.sequence(arm, depth + 1, ("elif", "else", "fi")),
                is_taken=False if not is_open else taken,
            )
            results += [] if body is None else [body]
            is_open = is_open and not (taken is True and body is not None)
        self._take("fi")
        merge(scope.variables, [*results, *([dict(scope.variables)] if is_open else [])])

    def _case(self, scope: ShellScope, depth: int) -> None:
        self.at += 1
        word = "".join(expand(self.tokens[self.at].text, scope, splits=False)) if self._peek() else ""
        while (token := self._peek()) is not None and token.text not in ("in", ";"):
            self.at += 1
        self.at += 1
        results: list[Variables] = []
        is_open = True
        while (token := self._peek()) is not None and token.text != "esac":
            patterns: list[str] = []
            while (token := self._peek()) is not None and token.text not in (")", "esac"):
                if token.kind == "word":
                    patterns.append("".join(expand(token.text, scope, splits=False)))
                self.at += 1
            if token is None or token.text == "esac":
                break
            self.at += 1
            taken = matched(word, patterns)
            body = self._arm(
                scope, lambda arm: self.sequence(arm, depth + 1, ("esac",)), is_taken=False if not is_open else taken
            )
            results += [] if body is None else [body]
            is_open = is_open and not (taken is True and (body is not None or "*" in patterns))
            while (token := self._peek()) is not None and (token.kind == "newline" or token.text == ";;"):
                self.at += 1
        self._take("esac")
        merge(scope.variables, [*results, *([dict(scope.variables)] if is_open or not results else [])])

    def _while(self, scope: ShellScope, depth: int) -> None:
        is_until = self.tokens[self.at].text == "until"
        self.at += 1
        result = self.sequence(scope, depth + 1, ("do",))
        taken = None if result is None else result != is_until
        body = self._arm(scope, lambda arm: self._body(arm, depth), is_taken=taken)
        merge(scope.variables, [dict(scope.variables) if taken is not True else body or {}, *([body] if body else [])])

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

    def _simple(self, scope: ShellScope, depth: int) -> bool | None:
        line = self.tokens[self.at].line
        raw, document, is_written = self._words(scope)
        assigned: list[tuple[str, str]] = []
        while raw and (found := _ASSIGN.match(raw[0])):
            name = self._assign(raw.pop(0), found, scope)
            value = scope.variables.get(name, "")
            assigned.append((name, value if isinstance(value, str) else " ".join(value)))
        if raw and raw[0] in _DECLARES:
            self._declare(raw, scope)
            return True
        words = [word for text in raw for word in expand(text, scope)]
        if not words:
            return True
        if words[0] in _NO_PROGRAMS:
            self.leaves = self.leaves or words[0] in _LEAVES
            _forget(words, scope, document)
            return None if words[0] == "read" else True
        if words[0] in self.functions and depth < MAX_DEPTH:
            called = _ScriptReader(self.functions[words[0]], self.commands)
            called.functions = self.functions
            called.sequence(ShellScope(scope.variables, scope.exported, words[1:]), depth + 1, ())
            return True
        environment = tuple({**scope.exported, **dict(assigned)}.items())
        is_background = (token := self._peek()) is not None and token.text == "&"
        inner = _inner_script(words, document, is_written=is_written)
        if inner is not None and depth < MAX_DEPTH:
            within = ShellScope(dict(scope.variables), {**scope.exported, **dict(assigned)}, scope.arguments)
            known = len(self.commands)
            _read_all(inner, within, depth + 1, self.commands)
            self.commands[known:] = [replace(command, line=line) for command in self.commands[known:]]
            return True
        self.commands.append(ShellCommand(tuple(words), line, environment, is_background))
        self.is_program = True
        return None

    def _words(self, scope: ShellScope) -> tuple[list[str], str | None, bool]:
        """Words of a simple command as written, its document, and whether its output is written to a file."""
        raw: list[str] = []
        document, is_written = None, False
        while (token := self._peek()) is not None:
            if token.kind == "word":
                raw.append(token.text)
            elif token.kind in ("document", "literal"):
                document = token.text if token.kind == "literal" else expand_document(token.text, scope)
            elif token.text in _REDIRECTS:
                is_written = is_written or token.text in (">", ">>")
                self.at += 1  # with the file's name
            else:
                break
            self.at += 1
        return raw, document, is_written

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


def _inner_script(words: list[str], document: str | None, *, is_written: bool) -> str | None:
    """Text of the script that a command runs, or writes to a file: `bash -c`, `eval`, `ssh host`, a document."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for at, word in enumerate(words[:-1]):
        if re.fullmatch(r"-\w*c", word) and any(_SHELLS.search(other) for other in words[:at]):
            return words[at + 1]
    if words[0] in _REMOTE and (texts := [word for word in words[1:] if " " in word.strip()]):
        return texts[-1]
    if document is not None and (_SHELLS.search(words[0]) or words[0] in _READS_SCRIPTS):
        return document if words[0] != "cat" or is_written else None
    return None


def _forget(words: list[str], scope: ShellScope, document: str | None) -> None:
    if words[0] == "unset":
        for name in words[1:]:
            scope.variables.pop(name, None)
    elif words[0] == "read":
        names = [word for word in words[1:] if NAME.fullmatch(word)]
        for name in names:
            scope.variables[name] = document if document is not None and len(names) == 1 else hole(name)
    elif words[0] == "shift" and scope.arguments:
        del scope.arguments[: int(words[1]) if len(words) > 1 and words[1].isdecimal() else 1]
