#include "eval/words.h"

namespace bam {

const std::vector<std::string>& adjectives() {
    static const std::vector<std::string> words = {
        "able", "amber", "ample", "ancient", "autumn", "awake", "basic", "bitter", "bold", "brave", "bright", "brisk",
        "broad", "bronze", "busy", "calm", "careful", "cheerful", "chilly", "clever", "cloudy", "coastal", "cold",
        "common", "coral", "cosmic", "crisp", "curious", "daily", "damp", "daring", "dusty", "eager", "early",
        "earnest", "elder", "empty", "even", "faint", "fair", "famous", "fancy", "fearless", "fertile", "festive",
        "fierce", "firm", "flat", "fluent", "foggy", "formal", "fragile", "frank", "fresh", "friendly", "frosty",
        "gentle", "giant", "glad", "global", "golden", "graceful", "grand", "grateful", "gray", "green", "hardy",
        "harsh", "hasty", "hazel", "heavy", "hidden", "hollow", "honest", "humble", "icy", "idle", "ivory", "jolly",
        "keen", "kind", "large", "late", "lazy", "lively", "local", "lonely", "loud", "loyal", "lucky", "lunar",
        "major", "marble", "mellow", "merry", "mighty", "mild", "misty", "modest", "narrow", "native", "neat",
        "noble", "northern", "novel", "odd", "olive", "open", "orange", "outer", "pale", "patient", "plain", "polite",
        "proud", "purple", "quick", "quiet", "rapid", "rare", "ready", "regal", "remote", "rich", "rocky", "rough",
        "round", "royal", "rural", "rustic", "sandy", "scarlet", "secret", "serene", "sharp", "shiny", "short",
        "silent", "silver", "simple", "sleepy", "slender", "slow", "smooth", "snowy", "solar", "solid", "southern",
        "spare", "spotted", "stable", "steady", "steep", "still", "stout", "strict", "strong", "sturdy", "subtle",
        "sunny", "sweet", "swift", "tall", "tame", "tender", "thin", "tidy", "tiny", "tough", "tranquil", "true",
        "urban", "useful", "vast", "velvet", "violet", "vivid", "warm", "western", "wide", "wild", "windy", "winter",
        "wise", "witty", "wooden", "young", "zealous",
    };
    return words;
}

const std::vector<std::string>& nouns() {
    static const std::vector<std::string> words = {
        "acorn", "actor", "album", "anchor", "anthem", "apple", "apron", "arch", "archer", "arrow", "artist", "atlas",
        "attic", "badge", "baker", "ballad", "bamboo", "banner", "barley", "barn", "basin", "basket", "beacon",
        "bead", "beaver", "bell", "bench", "berry", "bishop", "blanket", "blossom", "boat", "bonfire", "book",
        "border", "bottle", "bower", "branch", "bread", "brick", "bridge", "brook", "broom", "bucket", "buckle",
        "bugle", "cabin", "cable", "cactus", "camel", "canal", "candle", "canoe", "canvas", "canyon", "captain",
        "cargo", "carpet", "castle", "cavern", "cedar", "cellar", "chalk", "chapel", "cherry", "chimney", "cider",
        "cinema", "circle", "citrus", "clay", "cliff", "clock", "cloud", "clover", "coach", "cobbler", "compass",
        "copper", "corner", "cottage", "cotton", "cousin", "cradle", "crane", "crater", "creek", "crow", "crown",
        "cup", "curtain", "dagger", "daisy", "dancer", "deer", "desert", "diary", "doctor", "dolphin", "donkey",
        "door", "dragon", "drum", "eagle", "easel", "echo", "elbow", "ember", "engine", "ermine", "fable", "falcon",
        "farmer", "feather", "fence", "fern", "fiddle", "field", "finch", "fisher", "flag", "flame", "flask", "flute",
        "forest", "fossil", "fountain", "fox", "galaxy", "garden", "garlic", "gate", "geyser", "ginger", "glacier",
        "glove", "goblet", "goose", "granite", "grove", "guitar", "hammer", "harbor", "harp", "harvest", "hawk",
        "hazelnut", "hedge", "helmet", "heron", "hill", "hinge", "holly", "honey", "horizon", "hotel", "insect",
        "island", "jacket", "jasmine", "jewel", "jungle", "kernel", "kettle", "keyboard", "kitchen", "kite", "ladder",
        "lagoon", "lake", "lamp", "lantern", "lark", "lemon", "letter", "library", "lily", "lion", "lizard",
        "lobster", "locket", "lotus", "lumber", "magnet", "maple", "market", "mason", "meadow", "medal", "melon",
        "mentor", "mirror", "mitten", "monk", "moss", "mountain", "museum", "nectar", "needle", "nest", "notebook",
        "oak", "oasis", "ocean", "orchard", "otter", "oven", "owl", "oyster", "paddle", "palace", "panther", "paper",
        "parcel", "parrot", "pasture", "path", "peach", "pearl", "pebble", "pencil", "pepper", "piano", "pigeon",
        "pillow", "pilot", "pine", "planet", "plaza", "plum", "poet", "pond", "poppy", "prairie", "prism", "pumpkin",
        "puzzle", "quarry", "quill", "quilt", "rabbit", "raft", "railway", "rain", "raven", "ribbon", "river",
        "robin", "rocket", "rope", "rose", "saddle", "sailor", "salmon", "satchel", "scarf", "scholar", "school",
        "seal", "shadow", "sheep", "shell", "shepherd", "ship", "shore", "shovel", "sketch", "sky", "spider", "spoon",
        "spring", "squirrel", "stable", "statue", "stone", "stork", "storm", "stream", "street", "summit", "sunrise",
        "swan", "table", "tailor", "teapot", "temple", "thicket", "thistle", "thunder", "tiger", "timber", "torch",
        "tower", "trail", "train", "trumpet", "tulip", "tunnel", "turtle", "valley", "vessel", "village", "vine",
        "violin", "wagon", "walnut", "water", "whale", "wheat", "whistle", "willow", "window", "wizard", "wolf",
        "wool", "wren", "yarn",
    };
    return words;
}

}  // namespace bam
