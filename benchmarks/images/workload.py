"""What a sandbox does in the environment: small real tasks, as scripts that lie in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DIRECTORY = "/workspace"
SITE = "/opt/site"  # Python packages that the bench puts in


@dataclass(frozen=True, slots=True)
class Workload:
    """`script` runs in sh, in `DIRECTORY`. Without all programs of `needs`, `replay` reads what
    such tools read: a few large files whole, many small ones."""

    name: str
    needs: tuple[str, ...]
    script: str
    replay: str = ""

    @property
    def path(self) -> str:
        return f"{DIRECTORY}/tasks/{self.name}.sh"

    def text(self, has: Callable[[str], bool]) -> str:
        """Return the script for an environment in which `has` says which programs there are."""
        body = self.script if self.is_real(has) else self.replay
        return f"set -e\nexport HOME=/tmp LC_ALL=C PYTHONPATH={SITE}\ncd {DIRECTORY}\n{body}"

    def is_real(self, has: Callable[[str], bool]) -> bool:
        return all(has(program) for program in self.needs)


TASK = Workload(
    name="python",
    needs=("python3", "git", "gcc"),
    script="""\
python3 -c 'import asyncio, decimal, email, http.client, json, logging, sqlite3, ssl, xml.dom'
git status --porcelain
gcc -O1 -o /tmp/hello project/hello.c && /tmp/hello
python3 -B -m TESTER project
""",
    replay="find /usr -type f -size -64k | head -n 800 | xargs cat > /dev/null\n",
)
WORKLOADS = (
    TASK,
    Workload(
        name="cpp",
        needs=("g++",),
        script="g++ -O1 -o /tmp/words project/words.cpp && /tmp/words\n",
        replay="find /usr -type f -size +4M | head -n 6 | xargs cat > /dev/null\n",
    ),
    Workload(
        name="java",
        needs=("javac", "java"),
        script="javac -d /tmp/classes project/Words.java && java -cp /tmp/classes Words\n",
        replay="find /usr -type f -size +8M | head -n 5 | xargs cat > /dev/null\n",
    ),
    Workload(
        name="js",
        needs=("node",),
        script="node project/words.js\n",
        replay="find /usr -type f -size +16M | head -n 1 | xargs cat > /dev/null\n",
    ),
    Workload(
        name="go",
        needs=("go",),
        script="cd project && GOCACHE=/tmp/go GO111MODULE=off go build -o /tmp/words words.go\n",
        replay=(
            "find /usr -type f -size +2M | head -n 16 | xargs cat > /dev/null\n"
            "find /usr/include -type f | head -n 600 | xargs cat > /dev/null\n"
        ),
    ),
)
FILES = {
    "hello.c": '#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n',
    "words.cpp": """\
#include <algorithm>
#include <iostream>
#include <map>
#include <regex>
#include <string>
int main() {
    std::map<std::string, int> counts;
    std::string text = "a b a c";
    std::regex word("[a-z]+");
    for (std::sregex_iterator i(text.begin(), text.end(), word), end; i != end; ++i)
        ++counts[i->str()];
    std::cout << counts.size() << std::endl;
}
""",
    "Words.java": """\
import java.util.*;
import java.util.stream.*;
public class Words {
    public static void main(String[] arguments) {
        Map<String, Long> counts = Stream.of("a", "b", "a")
            .collect(Collectors.groupingBy(word -> word, Collectors.counting()));
        System.out.println(counts.size());
    }
}
""",
    "words.js": """\
const modules = ["assert", "crypto", "fs", "http", "path", "stream", "url", "util", "zlib"];
for (const name of modules) require(name);
console.log(new Set("a b a".split(" ")).size);
""",
    "words.go": (
        'package main\n\nimport (\n\t"fmt"\n\t"net/http"\n)\n\n'
        "func main() { fmt.Println(http.StatusOK) }\n"
    ),
    "words.py": "def count(text):\n    return len(set(text.split()))\n",
    "test_words.py": """\
import unittest

import words


class Words(unittest.TestCase):
    def test_counts_each_word_once(self):
        self.assertEqual(words.count("a b a"), 2)

    def test_counts_nothing_in_nothing(self):
        self.assertEqual(words.count(""), 0)


if __name__ == "__main__":
    unittest.main()
""",
}
PYTEST = "pytest -q -p no:cacheprovider"
UNITTEST = "unittest discover -s"
