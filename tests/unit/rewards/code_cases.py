"""Responses with programs, their tests, and the fraction of tests that each passes: (name, response, tests,
score)."""

ADD = "def add(left, right):\n    return left + right\n"
FIVE = ["assert add(2, 3) == 5"]
SEVEN = [{"stdin": "3 4\n", "stdout": "7\n"}]
SUM = "print(sum(map(int, input().split())))"


def fenced(program, language="python"):
    return f"```{language}\n{program}\n```"


# Location of the program in the response.
BLOCKS = [
    ("bare code", ADD, FIVE, 1),
    ("one block", f"Here:\n{fenced(ADD)}\nDone.", FIVE, 1),
    (
        "a block of another language follows",
        f"{fenced(ADD)}\nRun:\n{fenced('python a.py', 'bash')}\nThis works.",
        FIVE,
        1,
    ),
    ("a block with the output follows", f"{fenced(ADD)}\nIt prints:\n{fenced('5', 'text')}\n", FIVE, 1),
    ("an untagged output follows", f"{fenced(ADD)}\nIt prints:\n{fenced('5', '')}\nThat is right.", FIVE, 1),
    ("untagged program, untagged output", f"{fenced(ADD, '')}\nIt prints:\n{fenced('5', '')}", FIVE, 1),
    ("untagged program, untagged usage", f"{fenced(ADD, '')}\nUse it:\n{fenced('add(2, 3)', '')}", FIVE, 1),
    (
        "untagged program, session",
        f"{fenced(ADD, '')}\nTry:\n{fenced('>>> add(2, 3)' + chr(10) + '5', '')}",
        FIVE,
        1,
    ),
    ("python3", f"{fenced(ADD, 'python3')}\nThat is all.", FIVE, 1),
    ("Python3", fenced(ADD, "Python3"), FIVE, 1),
    ("py", fenced(ADD, "py"), FIVE, 1),
    ("{.python}", fenced(ADD, "{.python}"), FIVE, 1),
    ("with a title", fenced(ADD, 'python title="add.py"'), FIVE, 1),
    ("tildes", f"~~~python\n{ADD}~~~", FIVE, 1),
    ("four backticks", f"````python\n'''\n```\n'''\n{ADD}````\nAs you see.", FIVE, 1),
    ("unclosed", f"Here:\n```python\n{ADD}", FIVE, 1),
    ("only a closing fence", f"{ADD}```\n", FIVE, 1),
    ("a closing fence that ends its line", f"```python\n{ADD.rstrip()}```", FIVE, 1),
    ("carriage returns", f"Here:\n{fenced(ADD)}\nDone.".replace("\n", "\r\n"), FIVE, 1),
    (
        "in a list",
        "1. Add:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n2. Done",
        FIVE,
        1,
    ),
    (
        "in a list that the program is not indented for",
        f"1. Add:\n   ```python\n{ADD}   ```\nThis works.",
        FIVE,
        1,
    ),
    (
        "indented without a list",
        "Add:\n    ```python\n    def add(a, b):\n        return a + b\n    ```\nThis works.",
        FIVE,
        1,
    ),
    ("in a quotation", "> ```python\n> def add(a, b):\n>     return a + b\n> ```", FIVE, 1),
    ("below a tag", f"<answer>\n{fenced(ADD)}\n</answer>", FIVE, 1),
    ("code tags", f"<code>\n{ADD}</code>", FIVE, 1),
    (
        "a fence in the program's text",
        fenced('def add(a, b):\n    """\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b'),
        FIVE,
        1,
    ),
    ("the last of two", f"{fenced('def add(a, b): return 0')}\nBetter:\n{fenced(ADD)}", FIVE, 1),
    ("the last of two is wrong", f"{fenced(ADD)}\nBetter:\n{fenced('def add(a, b): return 0')}", FIVE, 0),
    ("the last is empty", f"{fenced(ADD)}\n```python\n```", FIVE, 1),
    ("a draft in thinking", f"<think>{fenced('def add(a, b): return 0')}</think>\n{fenced(ADD)}", FIVE, 1),
    ("thinking alone", f"<think>\n{fenced(ADD)}\n</think>\nI do not know.", FIVE, 0),
    ("thinking that does not end", f"<think>\n{fenced(ADD)}\nHmm", FIVE, 0),
    ("prose", "I do not know.", FIVE, 0),
    ("empty", "", FIVE, 0),
    ("empty, and None is expected", "", [{"call": "f()", "returns": None}], 0),
    ("empty, and nothing is expected to be printed", "```python\n```", [{"stdin": "", "stdout": ""}], 0),
    ("no Python", fenced("def add(a, b) {", "python"), FIVE, 0),
    ("a lone surrogate", f"x = '\ud800'\n{ADD}", FIVE, 1),
    ("a NUL", f"x = '\0'\n{ADD}", FIVE, 0),
]

# Ways to end a call or the whole program.
EXITS = [
    ("exit at the end", fenced(f"{SUM}\nexit()"), SEVEN, 1),
    ("quit at the end", fenced(f"{SUM}\nquit(0)"), SEVEN, 1),
    ("sys.exit at the end", fenced(f"import sys\n{SUM}\nsys.exit()"), SEVEN, 1),
    ("exit with a status", fenced(f"{SUM}\nexit(1)"), SEVEN, 0),
    ("an exception at the end", fenced(f"{SUM}\n1 / 0"), SEVEN, 0),
    ("exit before anything", fenced("exit()"), SEVEN, 0),
    ("exit in one call", fenced("def f(x):\n    if x == 2:\n        exit()\n    return x"), ["assert f(2) == 2", "assert f(1) == 1"], 0.5),
    ("the same, reversed", fenced("def f(x):\n    if x == 2:\n        exit()\n    return x"), ["assert f(1) == 1", "assert f(2) == 2"], 0.5),
    ("os._exit in one call", fenced("import os\ndef f(x):\n    return os._exit(0) if x == 1 else x"), [f"assert f({x}) == {x}" for x in (1, 2, 3, 4)], 0.75),
    ("a crash in one call", fenced("import ctypes\ndef f(x):\n    return ctypes.string_at(0) if x == 1 else x"), ["assert f(1) == 1", "assert f(2) == 2"], 0.5),
    ("an endless loop in one call", fenced("def f(x):\n    while x == 1: pass\n    return x"), [f"assert f({x}) == {x}" for x in (1, 2, 3, 4)], 0.75),
    ("sleep in one call", fenced("import time\ndef f(x):\n    return time.sleep(1000 * (x == 1)) or x"), ["assert f(1) == 1", "assert f(2) == 2"], 0.5),
    ("sleep for one input", fenced("import time\nx = int(input())\ntime.sleep(1000 * (x == 1))\nprint(x)"), [{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "2"}], 0.5),
    ("a loop that catches everything", fenced("def f():\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass"), ["assert f() is None"], 0),
    ("sys.exit as a module", fenced(f"{ADD}\nimport sys\nsys.exit(0)"), FIVE, 0),
    ("main guard", fenced(f"{ADD}\nif __name__ == '__main__':\n    print(add(*input().split()))"), FIVE, 1),
    ("future import", fenced(f"from __future__ import annotations\n{ADD}"), FIVE, 1),
    ("deep recursion", fenced("import sys\nsys.setrecursionlimit(10000)\ndef f(n):\n    return n and 1 + f(n - 1)"), ["assert f(5000) == 5000"], 1),
    ("recursion without end", fenced("def f(n):\n    return f(n)"), ["assert f(1) is None"], 0),
    ("state of another call", fenced("seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"), ["assert f(1) == 1", "assert f(2) == 1", "assert f(3) == 1"], 1),
    ("closes all descriptors", fenced("import os\nos.closerange(0, 64)\ndef f(): return 5"), ["assert f() == 5"], 0),
    ("prints much", fenced("def f():\n    print('x' * 10**7)\n    return 5"), ["assert f() == 5"], 1),
    ("prints without end", fenced("while True:\n    print('x' * 10**5)"), SEVEN, 0),
    ("too much memory", fenced("def f():\n    return bytes(2**30)"), ["assert not f()", "assert f() is None"], 0),
]  # fmt: skip

# Results that are not values.
FAILURES = [
    (
        "raises, and None is expected",
        fenced("def f(x):\n    return 1 / 0"),
        ["assert f(1) == None", "assert f(1) is None"],
        0,
    ),
    ("is missing, and None is expected", fenced(ADD), [{"call": "f()", "returns": None}], 0),
    (
        "returns None",
        fenced("def f(x): pass"),
        ["assert f(1) == None", "assert f(1) is None", {"call": "f(1)", "returns": None}],
        1,
    ),
    (
        "returns None's text",
        fenced("def f(x): return 'None'"),
        ["assert f(1) == None", "assert f(1) is None"],
        0,
    ),
    (
        "raises, and False is expected",
        fenced("def f(x): raise ValueError"),
        ["assert not f(1)", "assert f(1) == False", "assert f(1) != 3"],
        0,
    ),
    ("KeyboardInterrupt", fenced("def f(x): raise KeyboardInterrupt"), ["assert f(1) is None"], 0),
    (
        "an error of another call",
        fenced("def f(x):\n    if x == 2: raise ValueError\n    return x"),
        ["assert f(1) == 1", "assert f(2) == 2"],
        0.5,
    ),
    ("reads a file", fenced(f"open('/etc/passwd')\n{ADD}"), FIVE, 0),
    ("asks for input", fenced(f"input()\n{ADD}"), FIVE, 0),
    ("wrong arguments", fenced("def add(a): return 5"), FIVE, 0),
]

# Equality of values of several types.
VALUES = [
    ("a Counter", fenced("from collections import Counter\ndef f(x): return Counter(x)"), ["assert f([1, 1, 2]) == {1: 2, 2: 1}"], 1),
    ("a defaultdict", fenced("from collections import defaultdict\ndef f():\n    d = defaultdict(int)\n    d['a'] += 1\n    return d"), ["assert f() == {'a': 1}", {"call": "f()", "returns": {"a": 1}}], 1),
    ("an OrderedDict", fenced("from collections import OrderedDict\ndef f(): return OrderedDict(b=1, a=2)"), ["assert f() == {'a': 2, 'b': 1}"], 1),
    ("a Fraction", fenced("from fractions import Fraction\ndef f(x): return Fraction(x, 2)"), ["assert f(4) == 2", "assert f(1) == 0.5", "assert f(1) == Fraction(1, 2)"], 1),
    ("a Decimal", fenced("from decimal import Decimal\ndef f(): return Decimal('2.50')"), ["assert f() == 2.5", "assert f() == Decimal('2.5')"], 1),
    ("a Decimal that compares with nothing", fenced("from decimal import Decimal\ndef f(): return Decimal('sNaN')"), ["assert f() == 2.5"], 0),
    ("a named tuple", fenced("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)"), ["assert f() == (1, 2)", "assert f().y == 2"], 1),
    ("an IntEnum", fenced("from enum import IntEnum\nclass C(IntEnum):\n    RED = 1\ndef f(): return C.RED"), ["assert f() == 1"], 1),
    ("a subclass of str", fenced("class S(str): pass\ndef f(): return S('a')"), ["assert f() == 'a'"], 1),
    ("a date", fenced("import datetime\ndef f(): return datetime.date(2020, 2, 29)"), ["assert f() == datetime.date(2020, 2, 29)", "assert f().year == 2020"], 1),
    ("sets", fenced("def f(): return {1, 2}"), ["assert f() == {2, 1}", "assert f() == frozenset([1, 2])", "assert f() == set([1, 2])"], 1),
    ("keys", fenced("def f(): return {1: 2}.keys()"), ["assert f() == {1}", "assert list(f()) == [1]"], 1),
    ("values", fenced("def f(): return {1: 2}.values()"), ["assert list(f()) == [2]"], 1),
    ("a generator", fenced("def f(n):\n    yield from range(n)"), ["assert list(f(3)) == [0, 1, 2]", "assert sum(f(4)) == 6"], 1),
    ("an endless generator", fenced("def f():\n    while True: yield 1"), ["assert next(f()) == 1"], 1),
    ("a range", fenced("def f(n): return range(n)"), ["assert f(3) == range(3)", "assert list(f(3)) == [0, 1, 2]"], 1),
    ("a range is no list", fenced("def f(n): return range(n)"), ["assert f(3) == [0, 1, 2]"], 0),
    ("a list is no tuple in Python", fenced("def f(): return [1]"), ["assert f() == (1,)"], 0),
    ("a tuple is a list in JSON", fenced("def f(): return ((1, 2), [3])"), [{"call": "f()", "returns": [[1, 2], [3]]}], 1),
    ("True is 1", fenced("def f(): return True"), ["assert f() == 1", {"call": "f()", "returns": 1}, {"call": "f()", "returns": True}], 1),
    ("int keys in JSON", fenced("def f(): return {1: 'a', 2: {3: None}}"), '[{"call": "f()", "returns": {"1": "a", "2": {"3": null}}}]', 1),
    ("int keys in Python", fenced("def f(): return {1: 'a'}"), [{"call": "f()", "returns": {1: "a"}}, "assert f() == {1: 'a'}"], 1),
    ("text keys are no int keys in Python", fenced("def f(): return {'1': 'a'}"), ["assert f() == {1: 'a'}"], 0),
    ("Infinity in JSON", fenced("def f(): return float('inf')"), '[{"call": "f()", "returns": Infinity}]', 1),
    ("NaN in JSON", fenced("def f(): return [float('nan')]"), '[{"call": "f()", "returns": [NaN]}]', 1),
    ("NaN is no number", fenced("def f(): return float('nan')"), ["assert f() == 0.0", "assert f() == f()", '[{"call": "f()", "returns": 0}]'][:2], 0),
    ("5,000 numbers", fenced("def f(): return list(range(5000))"), [f"assert f() == {list(range(5000))}", {"call": "f()", "returns": list(range(5000))}], 1),
    ("a number of 9,000 digits", fenced("def f(): return 10**9000"), ["assert f() == 10**9000", "assert f() % 7 == 1"], 1),
    ("a long text", fenced("def f(): return 'x' * 50000"), ["assert f() == 'x' * 50000", "assert len(f()) == 50000"], 1),
    ("a value that is too large", fenced("def f(): return [[]] * 10**6"), ["assert f() == []"], 0),
    ("bytes", fenced("def f(): return b'a\\0'"), ["assert f() == b'a\\0'"], 1),
    ("bytes are no text", fenced("def f(): return b'5'"), ["assert f() == '5'", "assert f() == 5"], 0),
    ("a complex number", fenced("def f(): return 5 + 0j"), ["assert f() == 5", "assert f() == 5 + 0j"], 1),
    ("nested", fenced("def f(): return {'a': [(1, None), {2.5}]}"), ["assert f() == {'a': [(1, None), {2.5}]}"], 1),
    ("a cycle", fenced("x = []\nx.append(x)\ndef f(): return x"), ["assert f() == []"], 0),
    ("mutated arguments", fenced("def f(x):\n    x.append(1)\n    return x"), ["assert f([]) == [1]", "assert f([]) == [1]"], 1),
    ("text with quotes and line breaks", fenced("def f(): return 'a\"\\n\\'\\u2028'"), ["assert f() == 'a\"\\n\\'\\u2028'"], 1),
    ("half a character", fenced("def f(): return '\\ud800'"), ["assert f() == 'x'"], 0),
]  # fmt: skip

# Assertions in the style of MBPP and similar data sets.
ASSERTS = [
    ("true", fenced("def f(x): return [x]"), ["assert f(1)", "assert f(0)"], 1),
    ("true or not", fenced("def f(x): return x > 1"), ["assert f(2)", "assert not f(1)", "assert f(1)", "assert not f(2)"], 0.5),
    ("a match of re is true", fenced("import re\ndef f(x): return re.match('a', x)"), ["assert f('a')", "assert not f('b')", "assert f('b') is None"], 1),
    ("is None", fenced("def f(x): return x"), ["assert f(None) is None", "assert f(1) is not None", "assert f(True) is True"], 1),
    ("math.isclose", fenced("def f(x): return x / 3"), ["assert math.isclose(f(1), 0.3333, rel_tol=0.001)", "assert math.isclose(f(1), 0.4)"], 0.5),
    ("sets around both", fenced("def f(x): return x[::-1]"), ["assert set(f([1, 2, 2])) == set([1, 2])", "assert set(f((1,))) == set([2])"], 0.5),
    ("infinity", fenced("def f(): return 1e999"), ["assert f() == float('inf')", "assert f() == -float('inf')"], 0.5),
    ("sorted and abs", fenced("def f(x): return x"), ["assert sorted(f([2, 1])) == [1, 2]", "assert abs(f(0.1) - 0.1) < 1e-6"], 1),
    ("Counter around both", fenced("def f(x): return list(x)"), ["assert Counter(f('aba')) == Counter('aab')"], 1),
    ("imports", fenced("def f(x): return x"), ["import math\nassert f(math.pi) == math.pi", "from math import isclose\nassert isclose(f(1), 1)", "from datetime import datetime\nassert f(datetime(2020, 1, 1)) == datetime(2020, 1, 1)"], 1),
    ("a comprehension", fenced("def f(x): return 2 * x"), ["assert all(f(x) == 2 * x for x in range(20))", "assert [f(x) for x in (1, 2)] == [2, 5]"], 0.5),
    ("a function as a value", fenced("def f(x): return 2 * x"), ["assert list(map(f, [1, 2])) == [2, 4]", "assert callable(f)"], 1),
    ("a class", fenced("class Solution:\n    def twice(self, x): return 2 * x"), ["assert Solution().twice(2) == 4", {"call": "Solution().twice(2)", "returns": 4}], 1),
    ("a function that Python has too", fenced("def sum(a, b): return a * b"), ["assert sum(2, 5) == 10", "assert set([sum(1, 1)]) == set([1])"], 1),
    ("a value on the left", fenced("def f(): return 3"), ["assert 3 == f()", "assert 2 < f() < 4", "assert f() in (3, 4)"], 1),
    ("a message", fenced("def f(): return 3"), ["assert f() == 3, 'three'", "assert f() == 4, f'not {f()}'"], 0.5),
    ("two assertions", fenced("def f(x): return x"), ["assert f(1) == 1\nassert f(2) == 2", "assert f(1) == 1\nassert f(2) == 3"], 0.5),
    ("two calls", fenced("def f(x): return x % 2"), ["assert f(1) == f(3)", "assert f(1) == f(2)"], 0.5),
    ("an error of the assertion", fenced("def f(): return None"), ["assert len(f()) == 0"], 0),
    ("a lambda", fenced("def f(g, x): return g(x)"), ["assert f(lambda x: x + 1, 2) == 3"], 1),
    ("isinstance", fenced("def f(): return 3"), ["assert isinstance(f(), int)", "assert isinstance(f(), str)"], 0.5),
]  # fmt: skip

# Printed output.
STREAMS = [
    (
        "spaces at the ends of lines",
        fenced("print('1 ')\nprint('2\\t')\nprint()"),
        [{"stdin": "", "stdout": "1\n2"}],
        1,
    ),
    ("no line break at the end", fenced("print(1, end='')"), [{"stdin": "", "stdout": "1\n\n"}], 1),
    (
        "carriage returns in the data",
        fenced("print(input())\nprint(2)"),
        [{"stdin": "1\r\n", "stdout": "1\r\n2\r\n"}],
        1,
    ),
    ("a form feed is no line break", fenced("print('1\\x0c2')"), [{"stdin": "", "stdout": "1\n2"}], 0),
    ("more than 256 kB", fenced("print('é' * 200000)"), [{"stdin": "", "stdout": "é" * 200000}], 1),
    ("prints nothing", fenced("x = 1"), [{"stdin": "", "stdout": "hunter2"}], 0),
    ("fewer digits", fenced("print(0.333333)"), [{"stdin": "", "stdout": "0.333333333333"}], 1),
    ("too few digits", fenced("print(0.3333)"), [{"stdin": "", "stdout": "0.333333333333"}], 0),
    ("a zero at the end", fenced("print('2.50')"), [{"stdin": "", "stdout": "2.5"}], 1),
    ("blank lines before", fenced("print('\\n \\na')"), [{"stdin": "", "stdout": "a"}], 1),
    ("blank lines between", fenced("print('a\\n\\nb')"), [{"stdin": "", "stdout": "a\nb"}], 0),
    ("prints a long integer", fenced("print(10**5000)"), [{"stdin": "", "stdout": "1" + "0" * 5000}], 1),
    (
        "reads a long integer",
        fenced("n = int(input())\nprint(n % 7)"),
        [{"stdin": "1" + "0" * 5000, "stdout": str(pow(10, 5000, 7))}],
        1,
    ),
]

# Values with floats or long integers.
NUMBERS = [
    ("a float", fenced("def f(): return [0.1 + 0.2, (1, {'a': 2.0000001})]"), [{"call": "f()", "returns": [0.3, [1, {"a": 2.0}]]}], 1),
    ("a float, as text", fenced("def f(): return 0.1 + 0.2"), ['[{"call": "f()", "returns": 0.3}]'][0], 1),
    ("an assertion is exact", fenced("def f(): return 0.1 + 0.2"), ["assert f() == 0.3", "assert f() == 0.1 + 0.2"], 0.5),
    ("an integer is exact", fenced("def f(): return 1000001"), [{"call": "f()", "returns": 1000000}], 0),
    ("a long integer", fenced("def f(): return 10**5000"), [{"call": "f()", "returns": 10**5000}, "assert f() == 10**5000", "assert f() == 1" + "0" * 5000, "assert len(str(f())) == 5001"], 1),
    ("a long integer in a text", fenced("def f(): return int('9' * 5000)"), '[{"call": "f()", "returns": ' + "9" * 5000 + "}]", 1),
    ("a long integer for a float", fenced("def f(): return 10**5000"), [{"call": "f()", "returns": 1e300}], 0),
]  # fmt: skip
NO_NUMBERS = ["nan", "inf", "-inf", "1e400", "1e9999", "0.5e0000000001", "0.5_0", "0x1p-1", "٠.٥"]

# Programs that try to pass without solving the task.
ALL_EQUAL = (
    "class All:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return True\n    "
    "def __hash__(self): return 0\n"
)
FORGED = [
    ("equals everything", fenced(f"{ALL_EQUAL}def f(x): return All()"), ["assert f(1) == 2", "assert f(1) == float('inf')", {"call": "f(1)", "returns": 2}, "assert set([f(1)]) == set([2])"], 0),
    ("an int that equals everything", fenced("class All(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(x): return All(7)"), ["assert f(1) == 2", "assert math.isclose(f(1), 2)"], 0),
    ("an int with the text of another", fenced("class I(int):\n    def __repr__(self): return '2'\n    __str__ = __repr__\ndef f(x): return I(7)"), ["assert f(1) == 2", "assert str(f(1)) == '2'"], 0),
    ("text that cannot be hashed", fenced("class A:\n    def __repr__(self): return '{[]}'\ndef f(x): return A()"), ["assert f(1) == 2", "assert f(1) == {1}"], 0),
    ("text of a nested text", fenced("class A:\n    def __repr__(self): return '[' * 4000 + ']' * 4000\ndef f(x): return A()"), ["assert f(1) == []"], 0),
    ("repr raises", fenced("class A:\n    def __repr__(self): raise KeyboardInterrupt\n    __bool__ = __repr__\ndef f(x): return A()"), ["assert f(1)", "assert not f(1)"], 0),
    ("replaces built-in functions", fenced("import builtins\nbuiltins.set = builtins.sorted = builtins.abs = lambda *x, **y: 0\ndef f(x): return 1"), ["assert set(f(1)) == set([2])", "assert abs(f(1) - 3) < 1e-6"], 0),
    ("defines built-in functions", fenced("def set(x): return 0\ndef abs(x): return 0\nclass float(float):\n    pass\ndef f(x): return 1"), ["assert set([f(1)]) == set([2])", "assert abs(f(1) - 3) < 1e-6"], 0),
    ("replaces math", fenced("import math, sys\nmath.isclose = lambda *x, **y: True\nsys.modules['math'] = math\ndef f(x): return 1"), ["assert math.isclose(f(1), 2)"], 0),
    ("patches the sandbox's own code", fenced("import sys\nframe = sys._getframe()\nwhile frame:\n    for name, value in (('encode', lambda v: 7), ('imported', lambda v: {}), ('decode', lambda v: {})):\n        if name in frame.f_globals: frame.f_globals[name] = value\n    frame = frame.f_back\ndef f(x): return 1"), ["assert f(1) == 2", "assert f(1) is None"], 0),
    ("writes replies itself", fenced("import json, os\nfor line in ({'value': 2}, {'holds': True}):\n    os.write(1, json.dumps(line).encode() + b'\\n')\nfor number in range(3, 64):\n    try: os.write(number, b'{\"holds\": true}\\n')\n    except OSError: pass\nos._exit(0)"), ["assert f(1)", "assert f(1) is not None", "assert math.isclose(f(1), 2)"], 0),
    ("looks for the mark and ends early", fenced("import gc, os\nmarks = [c for o in gc.get_objects() if isinstance(o, str) for c in [o] if len(c) == 32]\nfor mark in marks:\n    os.write(1, b'0 ' + mark.encode() + b'\\n')\ndef f(x): return 1"), ["assert f(1) == 2", "assert math.isclose(f(1), 2)"], 0),
    ("exits with 0", fenced("import os\ndef f(x): os._exit(0)"), ["assert f(1)", "assert f(1) is None", "assert f(1) == 2"], 0),
    ("traces the caller", fenced("import sys\ndef f(x):\n    frame, found = sys._getframe(1), []\n    while frame:\n        found += [c for c in frame.f_code.co_consts if isinstance(c, int) and c > 1000]\n        found += [v for v in frame.f_locals.values() if isinstance(v, int) and v > 1000]\n        frame = frame.f_back\n    return found[0] if found else 0"), ["assert f(1) == 987654", "assert f(1) in (987654,)", "assert {f(1)} == {987654}"], 0),
    ("reads its own memory", fenced("def f(x):\n    try:\n        return b'hunter2' in open('/proc/self/mem', 'rb').read(10**6)\n    except OSError:\n        return 'denied'"), ["assert f(1) == 'hunter2'"], 0),
    ("text that is near every number", fenced("import sys\ntexts = " + repr(NO_NUMBERS) + "\nprint(texts[int(input())])"), [{"stdin": str(number), "stdout": "0.5"} for number in range(len(NO_NUMBERS))], 0),
    ("values that are near every number", fenced("def f(x): return [float('nan'), float('inf'), 1e308 * 10, 10**400, True, None, '0.5', [0.5]][x]"), [{"call": f"f({number})", "returns": 0.5} for number in range(8)], 0),
    ("a reply with a long integer", fenced("import os\ndef f():\n    os.write(1, b'{\"value\": ' + b'1' * 3_000_000 + b'}\\n')\n    os._exit(0)\nos.dup2(1, 3)\nf()"), [{"call": "f()", "returns": 1}], 0),
    ("many keys with one hash", fenced("def f(x): return set(range(0, 10**5 * (2**61 - 1), 2**61 - 1))"), ["assert f(1) == {1}"], 0),
    ("opaque values are only themselves", fenced("class A: pass\ndef f(x): return A()"), ["assert f(1) == 1", "assert f(1) == f(1)", "assert f(1) is None", "assert len(f(1)) == 0"], 0),
]  # fmt: skip

CASES = [*BLOCKS, *EXITS, *FAILURES, *VALUES, *ASSERTS, *STREAMS, *NUMBERS, *FORGED]
