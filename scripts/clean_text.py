#!/usr/bin/env python3
"""Unpacked Debian packages -> English prose: one JSON object {"text", "source"} a line, a document each.

usage: clean_text.py PACKAGES_DIR OUT.jsonl      (PACKAGES_DIR/<package>/usr/...)

Every reader below turns one format into blocks (kind, text): "head", "text", or "code", which stands for something left out.
Only paragraphs that read like sentences stay, each once in the whole corpus; code, tables and lists of names do not.
Only the standard library is used. A package that is not there is skipped and named.
"""
import glob
import gzip
import hashlib
import html.parser
import json
import os
import re
import subprocess
import sys

# ---- what is prose --------------------------------------------------------------------------------------------------

PLAIN = {ord(a): b for a, b in {
    "\u00a0": " ", "\u00ad": "", "\u2009": " ", "\u200b": "", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": " -- ",
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2026": "...", "\u00b4": "'", "\u02bc": "'", "\ufb01": "fi",
    "\ufb02": "fl", "\ufeff": ""}.items()}
FUNCTION_WORDS = set("""a an and are as at be been but by can could do for from had has have he her his i if in is it its may more no not of
on or our shall she so than that the their them then there they this thou to upon was we were what when which who will with would ye you
your""".split())


def tidy(text):
    text = re.sub(r".\x08|[\x00-\x08\x0e-\x1f\x7f]", "", text.translate(PLAIN))
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" ([,;:.!?)\]])(?=[\s\"')\]]|$)", r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", text)


def is_prose(p, ends=".!?"):
    """A paragraph of sentences: mostly letters, a fair share of function words, a full stop at the end."""
    if len(p) < 40 or not re.search(r"[" + ends + r"][\"')\]]*$", p):
        return False
    if sum(c.isalpha() or c in " ,.'" for c in p) < 0.9 * len(p) or sum(ord(c) > 127 for c in p) > 0.02 * len(p):
        return False
    words = re.findall(r"[a-z']+", p.lower())
    if len(words) < 7 or max(map(len, p.split())) > 40:
        return False
    if sum(bool(re.search(r"[_=<>{}|\\/@#$%^*~`]|[a-z][A-Z]|\w\(\)", w)) for w in p.split()) > 0.08 * len(words):
        return False  # names of functions, paths, options
    return sum(w in FUNCTION_WORDS for w in words) >= 0.25 * len(words)


def begins_well(p):
    """Not in the middle of a sentence: a small first letter only in a name (dpkg-repack, x86)."""
    first = p.split(" ", 1)[0]
    return not (p[0].islower() and first.strip(",;:").isalpha()) and p[0] not in ".,;:)]}"


class Corpus:
    def __init__(self, out):
        self.out = out
        self.seen = set()
        self.sizes = {}

    def is_new(self, p):
        key = hashlib.blake2b(re.sub(r"\W+", " ", p.lower()).encode(), digest_size=8).digest()
        if key in self.seen:
            return False
        self.seen.add(key)
        return True

    def add(self, source, blocks, least=400):
        """One document: its prose, and the headings that stand above some."""
        blocks = [(kind, text if kind == "verse" else tidy(text)) for kind, text in blocks]
        paragraphs, heading = [], None
        for i, (kind, text) in enumerate(blocks):
            if kind == "head":
                heading = re.sub(r"^(?:(?:Chapter|Appendix|Part) )?(?:[\dA-Z]{1,3}(?:\.\d+)*[.:] |\d+(?:\.\d+)* )|\s*[\u00b6#:]$", "", text)
                heading = heading.capitalize() if heading.isupper() and len(heading) > 4 else heading
            if kind == "text" and text.endswith(":") and not is_prose(blocks[i + 1][1] if i + 1 < len(blocks) else ""):
                text = re.sub(r"(?:^|(?<=[.!?] ))[^.!?]*:$", "", text).strip()  # it announces what is left out
            if kind == "text" and is_prose(text, ".!?:") and begins_well(text) or kind == "verse":
                if self.is_new(text):
                    paragraphs += ([heading] if heading and 2 < len(heading) < 100 else []) + [text]
                    heading = None
        self.write(source, "\n\n".join(paragraphs), least)

    def add_pages(self, source, entries, least=0, size=6000):
        """Documents of about `size` characters from entries that follow each other in a book, those of `least` and more."""
        page, length = [], 0
        for blocks in entries:
            kept = [t for t in (tidy(b) for b in blocks) if is_prose(t)]
            if sum(map(len, kept)) < least:
                continue
            kept = [t for t in kept if self.is_new(t)]
            page += kept
            length += sum(map(len, kept))
            if length >= size:
                self.write(source, "\n\n".join(page), 0)
                page, length = [], 0
        self.write(source, "\n\n".join(page), 0)

    def write(self, source, text, least):
        if len(text) < max(1, least):
            return
        self.out.write(json.dumps({"text": text + "\n", "source": source}, ensure_ascii=False) + "\n")
        documents, size = self.sizes.get(source, (0, 0))
        self.sizes[source] = (documents + 1, size + len(text.encode()) + 1)


def read(path):
    data = (gzip.open if path.endswith((".gz", ".dz")) else open)(path, "rb").read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


# ---- formats --------------------------------------------------------------------------------------------------------

class Html(html.parser.HTMLParser):
    BLOCKS = set("""address article aside blockquote body br center dd div dl dt fieldset figure form h1 h2 h3 h4 h5 h6 hr html li main
    ol p section table tbody td th tr ul title""".split())
    SKIPPED = {"script", "style", "head", "nav", "header", "footer", "pre", "table", "svg", "math", "form", "button", "select"}
    VOID = {"br", "hr", "img", "input", "link", "meta", "area", "base", "col", "wbr", "source"}
    BAD_CLASSES = re.compile(r"nav|toc|footer|header|sidebar|synopsis|programlisting|screen|breadcrumb|menu|index|footnote|copyright"
                             r"|legalnotice|listing|literalblock|langs|bottomlang|up\b", re.I)

    def __init__(self, skipped):
        super().__init__(convert_charrefs=True)
        self.skipped = skipped
        self.blocks, self.words, self.kind = [], [], "text"
        self.skip = []  # open elements, from the outermost skipped one

    def end_block(self):
        text = "".join(self.words)
        if text.strip():
            self.blocks.append((self.kind, text))
        self.words, self.kind = [], "text"

    def handle_starttag(self, tag, attrs):
        if self.skip:
            if tag not in self.VOID:
                self.skip.append(tag)
            return
        attributes = dict(attrs)
        marks = (attributes.get("class") or "") + " " + (attributes.get("id") or "")
        if tag in self.skipped or tag in ("div", "ul", "p", "span", "a", "td", "dl") and self.BAD_CLASSES.search(marks):
            if tag in self.BLOCKS or tag in ("pre", "head"):
                self.end_block()
            if tag in ("pre", "table", "div"):
                self.blocks.append(("code", ""))
            if tag not in self.VOID:
                self.skip.append(tag)
        elif tag in self.BLOCKS:
            self.end_block()
            self.kind = "head" if re.fullmatch("h[1-6]", tag) else "text"

    def handle_endtag(self, tag):
        if self.skip:
            if tag in self.skip:  # elements left open inside end with it
                while self.skip.pop() != tag:
                    pass
        elif tag in self.BLOCKS:
            self.end_block()

    def handle_data(self, data):
        if not self.skip:
            self.words.append(data)


def html_blocks(text, tables=False):
    """tables: they hold the page's layout, not data."""
    parser = Html(Html.SKIPPED - {"table"} if tables else Html.SKIPPED)
    parser.feed(text)
    parser.close()
    parser.end_block()
    return parser.blocks


def pod_blocks(text):
    def plain(s):
        for _ in range(3):
            s = re.sub(r"L<<?\s*(?:([^<>|]*)\|)?([^<>|]*?)\s*>?>", lambda m: m[1] or m[2], s)
            s = re.sub(r"E<(\w+)>", lambda m: {"lt": "<", "gt": ">", "sol": "/", "verbar": "|"}.get(m[1], ""), s)
            s = re.sub(r"X<[^<>]*>", "", s)
            s = re.sub(r"[BCFISZ]<<+\s(.*?)\s>>+", r"\1", s, flags=re.S)
            s = re.sub(r"[BCFISZ]<([^<>]*)>", r"\1", s)
        return s
    for p in re.split(r"\n\s*\n", text):
        if re.match(r"=head\d", p):
            yield "head", plain(p.split(None, 1)[1]) if " " in p else ""
        elif p[:1].isspace():
            yield "code", ""
        elif not p.startswith("="):
            yield "text", plain(p)


def man_blocks(text):
    def plain(s):
        s = re.sub(r"\\\[(\w\w)\]", r"\\(\1", s)
        s = re.sub(r"\\f[BIRP]|\\f\(..|\\f\[\w*\]|\\[&|^/%]|\\s[+-]?\d", "", s)
        for a, b in (("\\-", "-"), ("\\e", "\\"), ("\\(aq", "'"), ("\\(dq", '"'), ("\\(em", " -- "), ("\\(en", "-"), ("\\(lq", '"'),
                     ("\\(rq", '"'), ("\\(bu", ""), ("\\ ", " "), ("\\~", " "), ("\\(co", ""), ("\\(ti", "~"), ("\\(ha", "^"), ("\\:", "")):
            s = s.replace(a, b)
        return s
    lines, code, tag_next = [], False, False
    for line in text.split("\n"):
        line = re.sub(r'\\".*', "", line)
        m = re.match(r"[.'] *([A-Za-z]+) *(.*)", line)
        if not m:
            if tag_next:
                tag_next = False  # the tag of a list item
            elif not code and line and line[0] not in ".'":
                lines.append(plain(line))
            continue
        macro, rest = m.groups()
        if macro in ("B", "I", "BR", "IR", "RB", "RI", "BI", "IB", "SM", "SB", "UR", "UE", "MT", "ME"):
            if tag_next:
                tag_next = False
            elif not code and macro not in ("UR", "MT"):
                parts = [plain(p.strip('"')) for p in re.findall(r'"[^"]*"|\S+', rest)]
                lines.append(("" if macro in ("BR", "IR", "RB", "RI", "BI", "IB") else " ").join(parts))
            continue
        if lines:
            yield "text", re.sub(r" ?\((\d[a-z]*)\)", "", " ".join(lines))
        lines = []
        tag_next = macro in ("TP", "TQ")
        if macro in ("nf", "EX", "TS"):
            code = True
            yield "code", ""
        elif macro in ("fi", "EE", "TE"):
            code = False
        elif macro in ("SH", "SS"):
            head = plain(rest.strip('" '))
            code = head in ("SYNOPSIS", "SEE ALSO", "COLOPHON", "NAME", "ATTRIBUTES", "AUTHOR", "AUTHORS", "STANDARDS")
            yield "head", head
    if lines:
        yield "text", " ".join(lines)


# ---- dictionaries and books -------------------------------------------------------------------------------------------

def entries_of(text, skip_to=None):
    """(head lines, body paragraphs) of a dict database: heads start at the margin, bodies are indented."""
    head, body = [], []
    for line in (text[text.index(skip_to):] if skip_to else text).split("\n"):
        if line[:1].strip():
            if body:
                yield head, re.split(r"\n\s*\n", "\n".join(body))
                head, body = [], []
            head.append(line)
        else:
            body.append(line)
    yield head, re.split(r"\n\s*\n", "\n".join(body))


def braces(s):
    return re.sub(r"[{}]", "", s)


def webster(text):
    """GCIDE: without pronunciations, etymologies and marks of its sources; a sense or a quotation is a paragraph."""
    for head, body in entries_of(text, "\nA \\A"):
        whole = braces("\n".join(head) + "\n" + "\n\n".join(body))
        whole = re.sub(r"\\[^\\]{1,80}\\", "", whole)
        for _ in range(2):
            whole = re.sub(r"\[[^\[\]]*\]", "", whole)
        whole = re.sub(r"\s\((?:[A-Z][a-z. &]{1,14}\.|[^()]*[`\"*][^()]*)\)", "", whole)  # (Zool.), more pronunciations
        whole = re.sub(r"(\s\.){2,}", " ...", whole)
        whole = re.sub(r"\s+--\s*(?=[A-Z])", " -- ", whole)
        word, blocks = tidy(head[0].split("\\")[0]) if head else "", []
        for p in re.split(r"\n\s*\n", whole):
            p = re.sub(r"^([^.]+(?:\.[^.]{0,20}){0,4}?\.) 1\. ", r"\1 ", tidy(p))
            p = re.sub(r"^\s*(?:\d+\.|\([a-z]\))\s+", "", tidy(p))
            p = re.sub(r"\s*,\s*(?=(?:n|a|v|adv|prep|conj|interj|p|pl)\.)", ", ", p)
            if "?" in p or "Obs." in p or not is_prose(p):
                continue
            if not blocks and not p.startswith(word):
                p = f"{word}. {p[:1].upper()}{p[1:]}"
            blocks.append(p[:1].upper() + p[1:])
        yield blocks


def foldoc(text):
    for head, body in entries_of(text, "\nFree On-line Dictionary of Computing%%%"):
        title = head[0].split("%%%")[0] if head else ""
        blocks = []
        for p in body:
            p = re.sub(r"\{?\(?https?://[^\s)}]*\)?\}?|\(\d{4}-\d\d-\d\d\)|\{[^{}]*\(\s*(?:http|/|ftp)[^{}]*\}\.?", "", p)
            p = tidy(re.sub(r"^\s*<[^<>]{1,60}>\s*", "", braces(p)))
            p = re.sub(r"^\s*\d+\.\s*(<[^<>]{1,60}>)?\s*", "", p)
            blocks.append(p if blocks or not title else f"{title[:1].upper()}{title[1:]}. {p}")
        yield blocks


def jargon(text):
    for head, body in entries_of(text, "\n/dev/null"):
        blocks = []
        for p in body:
            p = re.sub(r"^(\s*/[^/]*/,?)?\s*(?:(?:n|v|vt|vi|adj|adv|interj|prov|imp|excl|quant|pref|suff|obs)\.[, ]*)+", "",
                       tidy(braces(p)))
            p = re.sub(r"^(?:\d+\. )?\[[^\[\]]*\]\s*", "", p)
            if p:
                blocks.append(p if blocks or not head else f"{head[0][:1].upper()}{head[0][1:]}. {p}")
        yield blocks


def devil(text):
    """The Devil's Dictionary: verse keeps its lines."""
    document, length = [], 0
    for p in re.split(r"\n\s*\n", text[text.index("ABASEMENT"):]):
        lines = p.strip("\n").split("\n")
        verse = all(line.startswith("   ") for line in lines)
        if verse:
            p = "\n".join(re.sub(r"\s+", " ", line.translate(PLAIN)).strip() for line in lines)
        document.append(("verse" if verse else "text", p))
        length += len(p)
        if length > 6000 and not verse:
            yield document
            document, length = [], 0
    yield document


FORTUNES = """art computers cookie definitions education food fortunes goedel humorists kids law literature magic medicine miscellaneous
news paradoxum people pets platitudes riddles science sports tao wisdom work""".split()


def fortunes(text):
    for quote in re.split(r"\n%\n", text):
        quote = re.sub(r"\s+--\s+(?=[A-Z\"])", " -- ", quote)
        yield [quote if re.search(r"[.!?][\"')]*$", quote.strip()) else quote.strip() + "."]


KJV_BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy", "Josh": "Joshua", "Jdgs": "Judges",
    "Psa": "Psalms", "Prv": "Proverbs", "Eccl": "Ecclesiastes", "Isa": "Isaiah", "Jer": "Jeremiah", "Eze": "Ezekiel", "Dan": "Daniel",
    "Mat": "Matthew", "Rom": "Romans", "Rev": "Revelation"}


def king_james(path):
    """A table of offsets, then one stream of Unix `compress`; a chapter is a document."""
    data = open(path, "rb").read()
    text = subprocess.run(["gzip", "-dc"], input=data[data.index(b"\x1f\x9d\x90"):], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL).stdout
    chapters = {}
    for line in text.decode("latin-1").split("\n"):
        m = re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line)
        if m:
            chapters.setdefault((m[1], m[2]), []).append(re.sub(r"[\[\]<>]", "", m[3]))
    for (book, number), verses in chapters.items():
        blocks = [("head", f"{KJV_BOOKS.get(book, book)}, chapter {number}")]
        for i in range(0, len(verses), 6):
            blocks.append(("verse", tidy(" ".join(verses[i:i + 6]))))
        yield blocks


# ---- the packages -----------------------------------------------------------------------------------------------------

HTML = [
    ("debian-reference-en", "usr/share/debian-reference/*.en.html"),
    ("debian-faq", "usr/share/doc/debian/FAQ/*.en.html"),
    ("debian-faq", "usr/share/doc/debian/FAQ/*.html"),
    ("debian-policy", "usr/share/doc/debian-policy/policy.html/*.html"),
    ("developers-reference", "usr/share/developers-reference/*.html"),
    ("developers-reference", "usr/share/doc/developers-reference/*.html"),
    ("maint-guide", "usr/share/doc/maint-guide/html/*.en.html"),
    ("harden-doc", "usr/share/doc/harden-doc/html/en-US/*.html"),
    ("aptitude-doc-en", "usr/share/doc/aptitude/html/en/*.html"),
    ("cfi-en", "usr/share/doc/cfi-en/html/*.htm"),
    ("postgresql-doc-*", "usr/share/doc/postgresql-doc-*/html/*.html"),
    ("sqlite3-doc", "usr/share/doc/sqlite3/**/*.html"),
    ("git-doc", "usr/share/doc/git/html/**/*.html"),
    ("git-doc", "usr/share/doc/git-doc/**/*.html"),
    ("apache2-doc", "usr/share/doc/apache2-doc/manual/en/**/*.html"),
    ("libreoffice-help-en-us", "usr/share/libreoffice/help/en-US/text/**/*.html"),
    ("exim4-doc-html", "usr/share/doc/exim4-doc-html/**/*.html"),
    ("postfix-doc", "usr/share/doc/postfix/html/*.html"),
]


def files(root, package, pattern):
    return sorted(p for p in glob.glob(os.path.join(root, package, pattern), recursive=True) if os.path.isfile(p))


def build(root, corpus):
    def one(pattern):
        found = files(root, *pattern.split("/", 1))
        return found[0] if found else None

    def dictionary(source, path, reader, least=0):
        if path:
            corpus.add_pages(source, reader(read(path)), least)

    kjv = one("bible-kjv-text/usr/lib/bible.data")
    for blocks in king_james(kjv) if kjv else []:
        corpus.add("bible-kjv-text", blocks)
    path = one("dict-devil/usr/share/dictd/devil.dict.dz")
    for blocks in devil(read(path)) if path else []:
        corpus.add("dict-devil", blocks)
    for package in ("fortunes", "fortunes-min"):
        for path in files(root, package, "usr/share/games/fortunes/*"):
            if os.path.basename(path) in FORTUNES:
                corpus.add_pages("fortunes", fortunes(read(path)))
    dictionary("dict-jargon", one("dict-jargon/usr/share/dictd/jargon.dict.dz"), jargon)
    dictionary("dict-foldoc", one("dict-foldoc/usr/share/dictd/foldoc.dict.dz"), foldoc)
    dictionary("dict-gcide", one("dict-gcide/usr/share/dictd/gcide.dict.dz"), webster, 300)
    for package, pattern in HTML:
        for path in files(root, package, pattern):
            corpus.add(package.rstrip("-*"), html_blocks(read(path), package == "cfi-en"))
    for path in files(root, "perl-doc", "usr/share/perl/*/pod/*.pod"):
        if not re.search(r"delta|perl5\d+|toc|perlapi|perluniprops", os.path.basename(path)):
            corpus.add("perl-doc", pod_blocks(read(path)))
    for package in ("manpages", "manpages-dev"):
        for path in files(root, package, "usr/share/man/man*/*.gz"):
            corpus.add(package, man_blocks(read(path)))


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.split("\n\n")[1].strip())
    root, out = sys.argv[1:]
    with open(out, "w", encoding="utf-8") as f:
        corpus = Corpus(f)
        build(root, corpus)
    total = 0
    for source, (documents, size) in sorted(corpus.sizes.items(), key=lambda item: -item[1][1]):
        print(f"  {source:24} {documents:6} documents {size:12,} bytes")
        total += size
    print(f"  {'total':24} {sum(d for d, _ in corpus.sizes.values()):6} documents {total:12,} bytes")


main()
