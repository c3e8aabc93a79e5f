#include "prose.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <stdexcept>

#include "random.h"
#include "word_tokenizer.h"

namespace bam {

namespace {

using Words = std::vector<std::string>;

const std::map<std::string, Words>& slots() {
    static const std::map<std::string, Words> all = {
        {"name", {"Anna",  "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo",  "Irene", "Jonas",
                  "Karin", "Leo",   "Maria", "Nils",  "Olga",  "Paul",  "Rosa",  "Simon", "Tina",  "Viktor"}},
        {"city",
         {"Athens", "Berlin", "Boston", "Cairo", "Delhi", "Dublin", "Lima", "Lisbon", "London", "Madrid", "Oslo",
          "Paris", "Prague", "Rome", "Tokyo", "Vienna"}},
        {"job", {"baker", "doctor", "farmer", "gardener", "painter", "pilot", "sailor", "singer", "teacher", "writer"}},
        {"color", {"black", "blue", "brown", "gray", "green", "pink", "purple", "red", "white", "yellow"}},
        {"pet", {"cat", "dog", "goat", "horse", "parrot", "rabbit", "snake", "turtle"}},
        {"food", {"apples", "bread", "cake", "cheese", "fish", "honey", "rice", "soup"}},
        {"pass", {"pass key", "secret code", "locker number", "door code", "vault number", "magic number"}},
        {"person",
         {"baker", "boy",      "cat", "child",   "dog",    "farmer", "fox",    "gardener", "girl",    "goat",
          "horse", "neighbor", "owl", "painter", "rabbit", "sailor", "singer", "stranger", "teacher", "traveler"}},
        {"look", {"brave", "clever", "happy", "hungry", "lazy", "little", "old", "quiet", "tall", "tired", "young"}},
        {"thing",
         {"basket", "bell", "blanket", "boat", "bottle", "box", "chair", "clock", "drum", "kite", "ladder", "lamp",
          "letter", "map", "table", "wagon"}},
        {"make", {"broken", "clean", "dusty", "empty", "heavy", "large", "new", "old", "small", "strange", "wooden"}},
        {"place",
         {"barn", "bridge", "church", "forest", "garden", "harbor", "hill", "kitchen", "lake", "market", "mill",
          "river", "road", "school", "station", "tower", "well"}},
        {"size", {"big", "famous", "old", "pretty", "small"}},
        {"air", {"cold", "dark", "dry", "empty", "quiet", "warm"}},
        {"acts",
         {"danced", "laughed", "listened", "paused", "rested", "returned", "sang", "slept", "smiled", "stopped",
          "waited", "walked"}},
        {"does",
         {"borrowed", "bought", "carried", "cleaned", "dropped", "found", "hid", "lost", "moved", "painted", "sold",
          "wanted", "watched"}},
        {"how", {"calmly", "carefully", "gladly", "quietly", "slowly", "suddenly"}},
        {"by", {"near", "behind", "beside"}},
        {"event", {"concert", "festival", "game", "harvest", "meeting", "storm", "wedding"}},
        {"day", {"Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"}},
        {"then", {"Later", "Meanwhile", "Soon", "Then", "Today"}},
        {"time", {"afternoon", "autumn", "evening", "morning", "spring", "summer", "winter"}},
    };
    return all;
}

// Parts of a sentence by their length in tokens; "" is none.
const std::vector<Words> kOpenings = {{""}, {}, {"{then},"}, {"On {day},"}, {"In the {time},", "After the {event},"}};
const std::vector<Words> kSubjects = {
    {}, {"{name}", "{name}", "Everyone", "Nobody", "Somebody"}, {"The {person}"}, {"The {look} {person}"}};
const std::vector<Words> kActs = {{},
                                  {"{acts}"},
                                  {"{acts} {how}"},
                                  {"{does} the {thing}"},
                                  {"{does} the {make} {thing}", "{how} {does} the {thing}"},
                                  {"{how} {does} the {make} {thing}"}};
const std::vector<Words> kPlaces = {
    {""}, {}, {}, {"{by} the {place}"}, {"{by} the {air} {place}", "{by} the {size} {place}"}};
// Whole sentences without people, by length.
const std::vector<Words> kScenes = {{},
                                    {},
                                    {},
                                    {},
                                    {},
                                    {"The {thing} was {make}.", "The {place} was {air}."},
                                    {"The {color} {thing} was {make}.", "The {make} {thing} was {color}."},
                                    {"The {place} was {size} and {air}."},
                                    {"The {thing} {by} the {place} was {make}."},
                                    {"There was a {color} {thing} {by} the {place}."}};

struct Shape {
    int opening, subject, act, place;
};

// All ways to make a sentence of each length.
std::vector<std::vector<Shape>> make_shapes() {
    std::vector<std::vector<Shape>> shapes(kLongestSentence + 1);
    for (int o = 0; o < int(kOpenings.size()); o++)
        for (int s = 1; s < int(kSubjects.size()); s++)
            for (int a = 1; a < int(kActs.size()); a++)
                for (int p = 0; p < int(kPlaces.size()); p++)
                    if (!kOpenings[size_t(o)].empty() && !kPlaces[size_t(p)].empty())
                        shapes[size_t(o + s + a + p + 1)].push_back({o, s, a, p});
    return shapes;
}

const std::string& pick(const Words& words, Draw& draw) {
    return words[size_t(draw.below(int64_t(words.size())))];
}

std::string lower_first(std::string s) {
    s[0] = char(std::tolower(static_cast<unsigned char>(s[0])));
    return s;
}

// The words of a template outside its slots.
void add_words(const std::string& text, std::set<std::string>& words) {
    std::string word;
    bool slot = false;
    for (char c : text + ".") {
        if (c == '{') slot = true;
        if (!slot && std::isalpha(static_cast<unsigned char>(c))) {
            word += c;
        } else if (!word.empty()) {
            words.insert(word);
            word.clear();
        }
        if (c == '}') slot = false;
    }
}

}  // namespace

int Draw::below(int64_t n) {
    return int(random_below(seed_, stream_, next_++, uint64_t(n)));
}

const std::vector<std::string>& words_of(const std::string& slot) {
    const auto it = slots().find(slot);
    if (it == slots().end()) throw std::logic_error("no slot " + slot);
    return it->second;
}

std::string fill_in(const std::string& text, const Bindings& bound, Draw& draw) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        const size_t open = std::min(text.find('{', i), text.size());
        out.append(text, i, open - i);
        if (open == text.size()) break;
        const size_t close = text.find('}', open);
        const std::string slot = text.substr(open + 1, close - open - 1);
        const auto it = bound.find(slot);
        out += it != bound.end() ? it->second : pick(words_of(slot), draw);
        i = close + 1;
    }
    return out;
}

std::string prose_sentence(int tokens, Draw& draw) {
    static const std::vector<std::vector<Shape>> shapes = make_shapes();
    if (tokens < int(kScenes.size()) && !kScenes[size_t(tokens)].empty() && draw.one_in(5))
        return fill_in(pick(kScenes[size_t(tokens)], draw), {}, draw);
    const std::vector<Shape>& ways = shapes.at(size_t(tokens));
    const Shape way = ways.at(size_t(draw.below(int64_t(ways.size()))));
    const std::string& opening = pick(kOpenings[size_t(way.opening)], draw);
    std::string subject = pick(kSubjects[size_t(way.subject)], draw);
    if (!opening.empty() && subject[0] != '{') subject = lower_first(subject);
    std::string text = opening.empty() ? subject : opening + " " + subject;
    text += " " + pick(kActs[size_t(way.act)], draw);
    const std::string& place = pick(kPlaces[size_t(way.place)], draw);
    if (!place.empty()) text += " " + place;
    return fill_in(text + ".", {}, draw);
}

std::vector<std::string> prose(int tokens, Draw& draw) {
    std::vector<std::string> sentences;
    while (tokens > 0) {
        const int most = std::min(tokens, 13);
        int n = draw.between(std::min(kShortestSentence + 1, most), most);
        if (tokens - n < kShortestSentence) n = tokens;  // at most 15
        sentences.push_back(prose_sentence(n, draw));
        tokens -= n;
    }
    return sentences;
}

std::unique_ptr<Tokenizer> make_prose_tokenizer(const std::vector<std::string>& more) {
    std::set<std::string> words;
    for (const auto& [slot, list] : slots())
        for (const std::string& w : list) add_words(w, words);
    for (const auto* parts : {&kOpenings, &kSubjects, &kActs, &kPlaces, &kScenes})
        for (const Words& list : *parts)
            for (const std::string& w : list) add_words(w, words);
    for (const Words& list : kSubjects)
        for (const std::string& w : list) add_words(lower_first(w), words);
    for (const std::string& text : more) add_words(text, words);
    std::vector<std::string> all = {" ", "\n"};
    for (char c = '0'; c <= '9'; c++) all.push_back(std::string(1, c));
    for (const char* c : {".", ",", "?", "!", ":", ";", "'", "\"", "(", ")", "-"}) all.push_back(c);
    all.insert(all.end(), words.begin(), words.end());
    return make_word_tokenizer(all, "corpus");
}

}  // namespace bam
