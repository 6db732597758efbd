"""Answers by their ground truth: (truth, answers that are equal to it, answers that are not).

The tables of `math_cases.py` have one answer in a row; these show what one truth accepts and refuses.
"""

# Equations and inequalities: only a name on the left may be left out.
EQUATIONS = [
    (r"\frac{NO}{BO}=\frac12", ["1/2"], ["2"]),
    ("AB:CD=1:2", ["1:2"], ["2:1"]),
    (r"\frac{x}{y}=2", ["x=2y"], ["2"]),
    ("x+y=5", [], ["5"]),
    ("2x - 3y + 4z - 5 = 0", [], ["0"]),
    ("x^2 + y^2 = 4", [], ["4"]),
    (r"\frac{x^2}{4} + \frac{y^2}{9} = 1", [], ["1"]),
    ("y - 2 = 3(x-1)", [], ["3(x-1)"]),
    ("|z-1|=2", [], ["2"]),
    ("xy = 1", [], ["1"]),
    ("(x-1)^2+(y+2)^2=9", [], ["9"]),
    ("3x+4y=12", [], ["12"]),
    (r"\sin x = 0", [], ["0"]),
    ("2x=4", [], ["4", "2"]),
    ("2x + z = 1", [], ["1"]),
    ("a +3z = 0", [], ["0"]),
    ("a^2 + b = 0", [], ["0"]),
    (r"x^2+y^2=4 \text{ and } x+y=1", [], ["4,1"]),
    (r"x+y \le 3", [], ["3"]),
    (r"x+2y \le 3", [], ["3"]),
    ("9", ["x = 9", "9 = x"], ["3x = 9", "x^2+y^2=9"]),
    ("277", ["m+n=277"], []),
    ("y = 2x+3", ["2x+3"], []),
    ("f(x)=x^2", ["x^2", "y=x^2", "g(x)=x^2"], ["y=x^3", "f(y)=x^2"]),
    ("AB=5", ["5"], []),
    ("x = 2", ["2"], []),
    ("P(A)=0.5", ["0.5"], []),
    (r"\angle ABC=30^\circ", ["30"], []),
    ("a_n=2n+1", ["2n+1"], []),
    (r"\mathbf{v}=\begin{pmatrix}1\\2\end{pmatrix}", [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"], []),
    ("S_{10}=55", ["55"], []),
    (r"\overline{AB}=5", ["5"], []),
    (r"\overline{AB}", ["AB"], []),
    ("AB", [r"\overline{AB}"], []),
    (r"f^{-1}(x)=\frac{x}{2}", [r"\frac{x}{2}"], []),
    ("f'(x)=2x", ["2x"], []),
    ("(x,y)=(1,2)", ["(1,2)"], []),
    (r"\text{Area}=5", ["5"], []),
    (r"\bar{x}=5", ["5"], []),
    (r"A \cap B=\{1,2\}", [r"\{1,2\}"], []),
    (r"A^{-1}=\begin{pmatrix}1\\2\end{pmatrix}", [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"], []),
    (r"P(X=1)=\frac12", ["0.5"], []),
    ("E(X)=3", ["3"], []),
    (r"\mathbb{E}[X]=3", ["3"], []),
    (r"m_{\max }=n^2", ["n^2"], []),
    ("a:b=3:4", ["3:4"], []),
    (r"\frac{dy}{dx}=2x", ["2x"], []),
    ("y'=2x", ["2x"], []),
    (r"y^{\prime}+ry-rx=0", [], ["0"]),
    (r"m \frac{d v}{d t}+b v=f", [], ["f"]),
    (r"I \frac{d \omega}{d t}+2 B \omega=T", [], ["T"]),
    ("2x+3y=6", ["y=2-2x/3"], ["y=2-x/3"]),
    ("xy=1", [r"y=\frac1x"], []),
    (r"y=\frac1x", [], ["x^2y=x"]),
    (r"y=\frac{1}{x}", ["xy=1"], []),
    ("x=5", ["x=5", "5=x", r"x=\frac{10}{2}=5"], ["2x=10", "x=6"]),
    ("L=S-2B", [], ["S=L+2B"]),
    ("y=2x+1", ["2x-y+1=0"], []),
    (r"\frac{x-1}{2} = \frac{y+1}{3} = \frac{z}{4}", [
        r"\frac{x-1}{2}=\frac{1+y}{3}=\frac z4"
    ], [
        r"\frac{x-1}{2} = \frac{y}{7} = \frac{z}{4}", r"\frac{x-1}{2} = \frac{z}{4}"
    ]),
    ("a=2, b=3", ["2,3"], ["3,2"]),
    ("a=2,b=3", ["b=3, a=2"], []),
    (r"x^2+y^2 \le 4", [r"4 \ge x^2+y^2"], ["4"]),
    ("x^2+y^2 < 4", ["4 > x^2+y^2"], [r"x^2+y^2 \le 4", "x^2+y^2 > 4"]),
    (r"a^2 + b^2 \ge 2ab", [r"(a-b)^2 \ge 0", r"2ab \le a^2+b^2"], ["2ab"]),
    (r"1 \le x^2+y^2 < 4", [r"4 > x^2+y^2 \ge 1"], [r"1 \le x^2+y^2 \le 4"]),
    (r"x+y\ne 1", [r"1 \ne x+y"], ["x+y=1"]),
    (r"xy \le 4", [], [r"(-\infty,4]"]),
    (r"(-\infty,4]", [], [r"xy \le 4"]),
    ("[-2,2]", [], [r"x^2 \le 4"]),
    (r"x^2\le 4", [r"4\ge x^2"], []),
    ("y > 2x+1", ["y-2x>1", "2x+1 < y"], []),
    ("x > 2a", [r"(2a,\infty)"], []),
    (r"x=1,y=2 \text{ or } x=3,y=4", [
        r"x=3,y=4 \text{ or } x=1,y=2", "(1,2),(3,4)"
    ], [
        r"x=1,y=4 \text{ or } x=3,y=2", "(1,2),(4,3)"
    ]),
    ("p=5,q=2;p=7,q=2", ["p=7,q=2;p=5,q=2", "(5,2),(7,2)"], ["p=7,q=5;p=2,q=2"]),
    ("1; 2", ["1, 2"], []),
    ("1, 2 or 3", ["1,2,3"], []),
    ("(1;2)", ["(1,2)"], []),
    ("5", [], [r"\text{not } x = 5", "x is not = 5"]),
    ("x=1/3", [r"x=\frac13\approx 0.33"], []),
    ("A=5", [], ["S=5"]),
    (r"x<1 \text{ or } x>3", ["x>3;x<1"], []),
    ("x>1, x<3", ["1<x<3"], []),
    ("x>1; x<3", ["1<x<3"], []),
    ("x<1, x>3", [r"x<1 \text{ or } x>3"], []),
    ("x<1; x>3", [], [r"x<1 \text{ and } x>3"]),
]  # fmt: skip

# Sides that only Math-Verify reads.
UNDECIDED = [
    (r"\mathbf{v} = \begin{pmatrix}1\\2\end{pmatrix}", [
        r"\mathbf{v} = \begin{pmatrix} 1 \\ 2 \end{pmatrix}"
    ], [
    ]),
    (r"A = \begin{pmatrix}1\\2\end{pmatrix}", [
        r"A=\begin{bmatrix} 1 \\ 2 \end{bmatrix}"
    ], [
        r"B=\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"A=\begin{pmatrix}3\\2\end{pmatrix}"
    ]),
    (r"A = \begin{pmatrix}1&2\\3&4\end{pmatrix}", [r"A=\begin{pmatrix} 1 & 2\\ 3 & 4 \end{pmatrix}"], []),
    (r"S=\frac12", [r"S = \int_0^1 x dx"], []),
    (r"F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1}", [r"F_n = \sum_{k=0}^{n-1} F_{n-k-1}F_k"], []),
    (r"I = \int_0^1 2x dx", [r"I=\int_0^1 x\cdot 2\,dx"], []),
    (r"S=\frac13", [], [r"S = \int_0^1 x dx"]),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", [r"v=\begin{pmatrix} 1 \\ 2 \end{pmatrix}"], []),
    (r"\sum_{n=1}^\infty \frac{1}{n^2} = \frac{\pi^2}{6}", [r"\frac{\pi^2}{6}"], []),
    (r"\int 2x dx = x^2+C", ["x^2+C"], []),
    ("x+y=5", [], [r"\sum_{k=5}^5 k", r"\begin{pmatrix}1\\2\end{pmatrix}"]),
    (r"\begin{pmatrix}1\\2\end{pmatrix}, 5", [
        r"5, \begin{bmatrix} 1 \\ 2 \end{bmatrix}"
    ], [
        r"\begin{pmatrix}1\\3\end{pmatrix}, 5", r"\begin{pmatrix}1\\2\end{pmatrix}, 6"
    ]),
    (r"\begin{pmatrix}1&23\\3&4\end{pmatrix}", [
        r"\left(\begin{array}{cc}1&23\\3&4\end{array}\right)"
    ], [
        r"\left(\begin{array}{cc}12&3\\3&4\end{array}\right)", "(123, 34)"
    ]),
    (r"\left[\begin{array}{c}1\\2\end{array}\right]", [
        r"\begin{pmatrix}1\\2\end{pmatrix}", "[1, 2]"
    ], [
        r"\begin{pmatrix}2\\1\end{pmatrix}"
    ]),
    ("x+y=5", ["2x+2y=10"], ["x+y=x+y+1"]),
    (r"\tan(x+y)=1", [r"1=\tan(x+y)"], [r"x+y=\frac{\pi}{4}"]),
    (r"(1,3)", [r"x\in(-\infty,3) \text{ and } x\in(1,\infty)", "=(1,3)"], []),
    ("10", [], ["2 101_2"]),
    ("5", [], [r"it is not the case that x is \theta = 5"]),
    ("(1 2 3)", ["(1 2 3)", r"(1\;2\;3)"], ["(1 3 2)", "(12 3)", "(1 2)", "6"]),
    ("(1 2)(3 4)", ["(1 2)(3 4)"], ["(1 3)(2 4)", "24"]),
]  # fmt: skip

# Separators of thousands, and commas of lists.
THOUSANDS = [
    (r"32,\! 349", ["32349"], []),
    ("32349", [r"32,\! 349", r"32,\ 349"], []),
    (r"10,\!000,\! 000", ["10000000"], []),
    (r"11,\! 111,\! 111,\! 100", ["11111111100"], []),
    ("1234", [r"1,\;234", r"1\,234", "1{,}234", r"1,234\text{ dollars}"], [r"(1,\, 234)", "1, 234"]),
    (r"1,\, 234", ["1234"], []),
    ("12345", ["12~345"], []),
    (r"1\!,\!234", ["1234"], []),
    ("(1,234)", [r"(1,\, 234)"], []),
    ("1, 2", [r"1,\; 2"], []),
    ("12", [], [r"1,\; 2"]),
    ("1, 234", [r"1,\;234"], []),
    (r"\{100,200\}", [r"\{100, 200\}"], []),
    ("100,200", ["100, 200"], []),
    ("100200", ["100,200"], ["100, 200"]),
    ("(1000,2000)", ["(1,000, 2,000)"], []),
    ("(1234,5)", [r"(1,\!234, 5)"], []),
    ("1000", [r"\{1,000\}"], []),
    ("1, 0", [], ["1,000"]),
    ("2.5", ["2{,}5"], []),
    ("0.125", ["0{,}125"], []),
    ("0.5", [], ["0,5"]),
    ("(2,251,252)", ["(2, 251, 252)"], []),
    ("12345678", [r"12\,345\,678"], []),
    ("1.5", [], [r"1\,.5"]),
    ("25,100,55", ["25, 100, 55"], []),
    ("27,54,108,135,189", ["27, 54, 108, 135, 189"], []),
    ("60,180", ["60, 180"], []),
    ("60180", ["60,180"], []),
    ("2^3 125", [], ["2^{3125}"]),
    (r"1\,000\,000.5", ["1000000.5"], []),
    (r"-1,\;234", ["-1234"], []),
    (r"\$1,\;234", ["1234"], []),
    ("0125", [], [r"0,\ 125"]),
    ("100, 200, 5", [r"100,\ 200,\ 5"], []),
    ("(1,1234)", [r"(1,\ 1234)"], []),
]  # fmt: skip

# Spacing commands, repeated elements and names of segments.
WORDS_AND_SETS = [
    (r"\text{Monday}", [
        r"Monday\ ", r"\text{Monday}\,", r"\text{Monday\,}", r"\text{Monday}\quad",
        r"Monday\hspace{1cm}", r"Mon\!day"
    ], [
    ]),
    (r"\text{New York}", [r"\text{New}\ \text{York}", r"\text{New\ York}", "New~York"], []),
    ("A", [r"A\ "], []),
    ("18", [r"18\ "], []),
    (r"\{1,2\}", [r"\{1,2,2\}", "1,2,2"], []),
    (r"\{1,2,2\}", [r"\{1,2\}"], []),
    ("1,2", [], ["1,2,2"]),
    ("1,2,2", [], [r"\{1,2\}"]),
    ("(1,2)", [], ["(1,2,2)"]),
    (r"\{1,2,3\}", [], [r"\{1,2,2\}"]),
    (r"\overline{AB}", [], [r"\overline{CD}"]),
    (r"\overrightarrow{AB}", [r"\vec{AB}"], [r"\overrightarrow{BA}"]),
    (r"\vec{AB}", [], [r"\vec{BA}"]),
    (r"\sin\!x", [r"\sin x"], []),
    (r"\angle ABC", [], [r"\angle ACB"]),
]  # fmt: skip

# Answers that hedge, restate the problem, or have the right digits in another meaning.
GUESSES = [
    ("BA", ["AB", "A, B"], ["A", "AC"]),
    ("ACD", ["A, C, D", "DCA", "A, C and D"], ["A,C", "ABCD"]),
    ("CAB", ["C, A, B"], ["ABC"]),
    ("D", [r"\textbf{(D)}\ AB = 5", r"\textbf{(D) }\text{Set A}"], ["B is correct", "(D) $5$ (B)"]),
    ("x+y=5", ["x-5=-y"], ["0=0", "x=x", "x+y=5=6", "(x+y-5)(x-y)=0", r"x+y=5 \text{ or } x+y=6"]),
    (r"x+y\ge 5", [r"-x-y\le -5"], [r"-x-y\ge -5", r"0 \ge 0", "x+y>5"]),
    ("3", ["k=3"], ["k=3, k=4", "3, 4", "a=3 and b=4"]),
    (r"x \ne 3", ["x<3 or x>3"], [r"\text{concave down when } x<3, \text{ concave up when } x>3"]),
    ("0", [], ["I(0)", "y(0)", "P(0)"]),
    (r"60^\circ", [], ["1.5", "1.0"]),
    (r"1.5^\circ", ["1.5"], [r"60^\circ"]),
    (r"28\%", ["28 pct", "28 percentage"], ["28 cm"]),
    ("(1,2)", ["1<x<2"], ["[1,2]", r"\{1,2\}"]),
    ("[1,2]", [], ["(1,2)"]),
    ("(2,1)", [], ["(1,2)", "2<x<1"]),
    ("1,2", ["(1,2)"], ["1<x<2", "[1,2]", "(2,1)"]),
    (r"\{1,2\}", [], ["[1,2]", r"1 \le x \le 2", "(1,2)"]),
    ("[0,1]", [], [r"0 \le x < 1"]),
    ("(0,1)", [], ["(0,1]"]),
    (r"(-\infty,3)", ["x<3"], []),
    (r"(-\infty,3]", [], ["3"]),
    (r"(3,\infty)", [], ["3"]),
    ("[3,3]", [], ["3"]),
    ("3", [r"\{3\}", "(3)", "[3]"], ["[3,3]"]),
    (r"(0,1)\cup(1,2)", [], ["(0,2)"]),
    ("(0,2)", [], [r"(0,1)\cup(1,2)"]),
    (r"x<1 \text{ or } x>2", [], [r"x<1 \text{ and } x>2", "(1,2)"]),
    ("5", [
        r"\approx 5", "approximately 5", r"5\%", "It is 5", "5 cm", "5 percent", "5th",
        r"5 \text{ degrees Celsius}", r"x \in \{5\}", r"4.9 \approx 5"
    ], [
        "5, 6", "6, 5", "5 or 6", r"5 \text{ or } 6", "4,5,6", "x=5, x=6", r"\{5,6\}", r"\pm 5",
        "5; 6", r"5 \approx 6", "5 = 6", "6 = 5", "x = 6 = 5", "5, 5", r"x=5 \text{ or } y = 6",
        "between 4 and 6", "5 (or 6)", "5/6", r"5\ 6", "5 6", r"5 \quad 6", r"5\\6", "5 to 6", "5-6",
        r"5\text{ or maybe }6", r"6\text{ (not 5)}", "not 5", r"\neq 5", r"x \ne 5", "> 5", r"\ge 5",
        r"\le 5", "x>5", "about 6", r"5, 6, \ldots", r"5, \ldots", "...5", "at least 5", "at most 5",
        "more than 5", "less than 5", "5+", "5-", "5 + C", "5?", "5x", "5y=5", "-5", "5i", "5!", "|5",
        "5|", "five", "The number 5 or 6", "The answer is not 5", "the answer is 5 or 6", "none of 5",
        r"\text{5 or 6}", "any number, such as 5", r"\text{The answer could be 5}", r"5\text{ x}",
        r"5\text{ thousand}", "5 million", "5 dozen", "5k", "5 hundred", r"5 \times 10", "5 pi",
        "5 squared", "5 factorial", "5 minus 1", "5 plus 1", "5 times 2", "5 halves", "5 over 2",
        "5 mod 7", r"5 \pmod 7", r"\infty", r"\frac{5}{0}", r"5\cdot", "5 5", r"\sqrt{}5", "Monday",
        r"x \in \{5,6\}", r"5 \in \{5,6\}", r"x \in [5,6]", r"x\in\mathbb{R}"
    ]),
    ("5, 6", [], ["5", "5, 6, 7"]),
    ("5,6", ["5 and 6"], ["5,5,6", r"\pm5, 6"]),
    (r"\pm 5", ["-5, 5", r"\mp 5"], ["5"]),
    (r"3 \pm 2", ["5,1"], ["5"]),
    (r"\pm\sqrt{2}", [], [r"\sqrt2"]),
    (r"\pm 1 \pm \sqrt 2", [], [r"1+\sqrt2"]),
    (r"x=\pm 3", [], ["3"]),
    (r"\frac{1\pm\sqrt5}{2}", [r"\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}"], [r"\frac{1+\sqrt5}{2}"]),
    ("5 cm", [], ["5 m", "5 cm^2", "50 mm"]),
    ("5 cm^2", [], ["5 cm"]),
    ("5 m", [], ["500 cm"]),
    ("5 hours", [], ["5 minutes"]),
    (r"5\text{ km/h}", [], [r"5\text{ m/s}"]),
    ("5 ft", [], ["5 in"]),
    (r"5\text{ cm}^3", [], [r"5\text{ cm}^2"]),
    (r"60^\circ", ["60", r"\frac{\pi}{3}"], [r"60\text{ rad}", r"60\%"]),
    (r"\frac{\pi}{3}", [r"60^\circ"], []),
    ("60", [], [r"\frac{\pi}{3}"]),
    ("5 dollars", [], ["5 cents"]),
    (r"\$5", [], ["500 cents"]),
    (r"5\text{ apples}", [], [r"5\text{ oranges}"]),
    ("5 million", ["5000000"], []),
    (r"5 \pmod 7", [], ["5"]),
    (r"50\%", ["0.5"], ["5000"]),
    ("0.5", [r"50\%", r"0.5\%"], ["50", "0,50"]),
    ("50", [r"50\%"], ["0.5"]),
    ("5000", [], [r"50\%"]),
    ("0.005", [r"0.5\%"], []),
    ("1", [r"100\%"], ["0^0", "0.9999999", "x/x=1"]),
    ("100", [], [r"1\%", "1,00"]),
    (r"3\frac12", ["3.5"], ["1.5"]),
    (r"\frac32", [], [r"3\frac12"]),
    (r"3\cdot\frac12", [], [r"3\frac12"]),
    ("3 1/2", [], ["31/2"]),
    ("31/2", [], ["3 1/2"]),
    ("3-1/2", [], ["3 1/2"]),
    ("-3 1/2", ["-3.5"], ["-2.5"]),
    (r"x\frac12", ["x/2"], []),
    (r"3\frac{5}{2}", ["7.5"], ["5.5"]),
    (r"\infty", ["infinity"], [r"-\infty", "5", "diverges", r"\frac10"]),
    (r"\text{does not exist}", [], [r"\infty"]),
    ("0", [
        "0.", "x=0"
    ], [
        r"\frac{0}{0}", "undefined", r"\emptyset", "none", "no solution", "", " ", r"\;", "()", "-",
        ".", "()0", r"\text{}", r"\$", "0/0", "0.0000001", "2x+1=0"
    ]),
    ("no solution", [], ["0", r"\{0\}", "no solution, 5"]),
    ("none", [], ["no"]),
    ("no", [], ["none", "no solution", "yes and no"]),
    ("yes", ["Yes!", "Yes."], ["no", "yes or no", "yes, no", "not yes"]),
    (r"\emptyset", [], ["", r"\text{ }"]),
    ("55", [], ["5 5"]),
    ("A", [
        "A) 5", "A: 5", r"\mathbf{A}", "Answer: A"
    ], [
        "A, B", "A or B", "AB", "A and B", r"\text{A or B}", "ABCDE", "(A), (B)", "B. not A", "not A",
        "A or B. A", "A/B", "A; B", r"\text{(A) or (B)}", "Option A or Option B", "A B", "A.B",
        "A. B.", "(A) (B) (C)", r"A \text{ or } B", "a", "A=5", "A. 5 (B) 6", "A. (B)",
        "(A) 5 or (B) 6", "A. 4, B. 5, C. 6", "A,A"
    ]),
    ("AB", ["BA"], ["A"]),
    ("AC", ["A, C"], []),
    ("A,C", ["A and C"], []),
    ("Monday", [], ["Monday or Tuesday", "Monday, Tuesday", "not Monday", "Mon"]),
    ("even", [], ["odd or even", "not even"]),
    ("circle", ["a circle", "the circle"], ["not a circle"]),
    ("ellipse", [], ["circle"]),
    ("True", ["true"], ["False", "True or False", "T"]),
    (r"\text{(i) and (ii)}", [], [r"\text{(i)}"]),
    ("I", [], ["i"]),
    ("I, II", [], ["I"]),
    ("II", [], ["I"]),
    ("III", [], ["I, II, III"]),
    ("-1", ["i^2"], []),
    (r"\mathbb{R}", [], [r"x \in \mathbb{Z}", r"\mathbb{R}\setminus\{0\}"]),
    (r"\mathbb{Z}", [], [r"\mathbb{N}"]),
    (r"\mathbb{R}\setminus\{0\}", [r"x\ne 0"], [r"\mathbb{R}"]),
    ("1.5", [], ["1,5"]),
    ("1,5", [], ["1.5", "15"]),
    ("15", [], ["1,5"]),
    ("1.234", [], ["1,234"]),
    ("1234", [], ["1.234"]),
    ("1000", [], ["1.000", "1,00"]),
    (r"\{(1,2)\}", ["(1,2)"], ["(2,1)"]),
    (r"\{\emptyset\}", [], [r"\emptyset"]),
    (r"\{0\}", [], [r"\{\}"]),
    ("(1,2),(3,4)", [], ["(1,4),(3,2)", "1,2,3,4"]),
    ("(1,2,3,4)", [], ["(1,2),(3,4)"]),
    ("(1,(2,3))", [], ["(1,2,3)"]),
    (r"\{1,2,3\}", [], [r"\{1,2,\ldots,3\}"]),
    (r"\{1,2,\ldots,10\}", [], [r"\{1,2,10\}"]),
    (r"\{1,2,...,10\}", [r"\{1,2,\dots,10\}"], []),
    ("0.33", [r"\frac13 \approx 0.33"], ["1/3"]),
    ("1/3", ["0.333333"], ["0.3333", r"x=\frac13\approx 11"]),
    ("3.14", [], [r"\pi"]),
    ("2.5", [], ["2"]),
    ("2", [], ["2.4", "2.0000001"]),
    ("1000000", [], ["1000000.4"]),
    ("0.0000001", [], ["0"]),
    ("0.9999999", [], ["1"]),
    (r"\sqrt2", ["1.414213"], []),
    (r"\frac13", [r"\frac13 \approx 0.33"], []),
    ("4.9", [], [r"4.9 \approx 5"]),
    ("4", [], [r"4 \approx 5"]),
    ("x", ["x^1"], ["-x", "|x|", "X", "x=5"]),
    ("x+1", ["y=x+1"], ["x+1+C"]),
    ("x^2", [], ["x^2+C", "2x", "x_2"]),
    ("x^2+C", [], ["x^2", "x^2+K"]),
    ("a", [], ["A"]),
    ("2x", ["x2"], []),
    ("x_1", [], ["x1"]),
    ("ab", ["ba"], []),
    ("sin x", [], ["sin y"]),
    (r"\sin x", [r"\sin(x+2\pi)"], [r"\cos x"]),
    ("e^x", [], ["ex"]),
    ("x!", [], ["x"]),
    ("log x", ["ln x"], []),
    (r"\log_2 x", [], [r"\ln x"]),
    ("n(n+1)/2", [], ["n(n+1)"]),
    (r"\frac{dy}{dx}", [], [r"\frac{y}{x}"]),
    (r"\sqrt{x^2}", [], ["x"]),
    ("(x-1)^2", ["(1-x)^2"], []),
    ("x/y", [], ["y/x"]),
    ("f(x)", [], ["x"]),
    ("2x+1", ["f(x)=2x+1"], ["2x+1=0"]),
]  # fmt: skip

# Intervals that touch are one, an unknown may have a minus sign, and a logarithm may have the base 10.
OTHER_FORMS = [
    ("(0,2)", [
        r"(0,1]\cup(1,2)", r"(0,1)\cup\{1\}\cup(1,2)", r"(1,2)\cup(0,1]", r"(0,1)\cup[1,2)"
    ], [
        r"(0,1]\cup[1,2]", r"(0,1]\cup(1,3)", r"(0,1)\cup(1,2)"
    ]),
    (r"(0,1]\cup(1,2)", ["(0,2)"], ["(0,1)"]),
    (r"\mathbb{R}", [r"x<3 \text{ or } x\ge 3"], [r"x<3 \text{ or } x>3"]),
    ("x<1", ["-x>-1", "-1<-x"], ["-x>1", "-x<-1", r"-x\ge-1", "x>-1"]),
    ("x<-1", ["-2+3<-x"], ["-2-1<-x"]),
    (r"x\ne 1", [r"-x\ne -1"], [r"-x\ne 1"]),
    ("[-2,2]", [r"2\ge -x\ge -2"], [r"2>-x>-2"]),
    (r"[-\pi,\pi]", [r"-\pi\le x\le\pi"], [r"-\pi<x<\pi"]),
    ("-a<x<a", ["a>x>-a"], ["-a<x<b"]),
    ("2", [r"\log(100)", r"\log{100}"], [r"\log 10", r"\ln 100", r"\log_2 100", r"\log 100.5"]),
    (r"\log 100", ["2", r"\ln 100"], ["3", r"\log 1000"]),
    (r"\ln 10", [r"\log 10"], ["1"]),
]  # fmt: skip

BY_TRUTH = [*EQUATIONS, *UNDECIDED, *THOUSANDS, *WORDS_AND_SETS, *GUESSES, *OTHER_FORMS]

# Where this reward and Math-Verify disagree, by the reason: (reason, whether the answer is right, pairs of a truth
# and an answer). This reward is right in all rows.
MATH_VERIFY_DIFFERS = [
    ("the right side of an equation is no answer to it", False, [
        ("x+y=5", "5"), ("xy = 1", "1"), (r"\sin x = 0", "0"), ("m+n=5", "5"),
    ]),
    ("an equation or inequality that is not solved is no solution", False, [
        ("9", "3x = 9"), ("0", "2x+1=0"), ("L=S-2B", "S=L+2B"), ("[-2,2]", r"x^2 \le 4"), ("(-2,2)", "x^2<4"),
    ]),
    ("values belong to their names and groups", False, [
        ("a=2, b=3", "3,2"), (r"x=1,y=2 \text{ or } x=3,y=4", r"x=1,y=4 \text{ or } x=3,y=2"),
    ]),
    ("order and brackets have a meaning", False, [
        ("(1,2)", r"\{1,2\}"), ("1,2", "1<x<2"), ("3", "[3,3]"), (r"\angle ABC", r"\angle ACB"),
        (r"x<1 \text{ or } x>2", r"x<1 \text{ and } x>2"),
    ]),
    ("an element of a list counts as often as it is written", False, [("1,2", "1,2,2"), ("5", "5, 5")]),
    ("a chain with a contradiction states nothing", False, [
        ("5", "6 = 5"), ("5", "4=5"), ("5", "x = 6 = 5"), ("1/3", r"x=\frac13\approx 11"), ("4", r"4 \approx 5"),
    ]),
    ("words and units change a value", False, [
        ("5", r"5\text{ thousand}"), ("5", r"\text{not } x = 5"), ("5 cm", "5 m"), ("5 hours", "5 minutes"),
        (r"60^\circ", r"60\%"), (r"60^\circ", r"60\text{ rad}"),
    ]),
    ("dots stand for elements", False, [(r"\{1,2,\ldots,10\}", r"\{1,2,10\}")]),
    ("capital letters are other names", False, [("x", "X"), ("A", "a")]),
    ("small numbers and other bases are compared exactly", False, [
        (r"2^{-98}", r"2^{-99}"), ("0.0000014", "0.000001"), ("101_3", "101_2"),
    ]),
    ("spaces beside a thousands comma", True, [("1234", r"1,\;234"), ("12345678", r"12\,345\,678")]),
    ("mirrored inequalities", True, [(r"x+y\ne 1", r"1 \ne x+y")]),
    ("exact values of functions, powers and periods", True, [
        ("-1", r"e^{i\pi}"), ("1/3", r"0.\bar{3}"), (r"\frac{1}{2}ab", r"\frac{ab}{2}"),
    ]),
    ("notation of plain text", True, [
        ("3.5", "3 1/2"), ("1500", "1.5e3"), ("5 million", "5000000"), ("yes", "Yes."),
    ]),
    ("names and words for the same", True, [
        ("f(x)=x^2", "y=x^2"), (r"\overline{AB}", "AB"), (r"\frac{dy}{dx}=2x", "2x"), (r"\varnothing", "no solution"),
        (r"\frac{\pi}{3}", r"60^\circ"), ("B", r"\text{Option B}"),
    ]),
]  # fmt: skip
