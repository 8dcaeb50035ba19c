"""Every mistake in a config is told with its place, what was given, what exists and what to do."""

import re
from pathlib import Path

import pytest

from trainer.config import Builder, ConfigError, load

GIN = """\
experiment:
  model = @models.mlp()
  data = @data.digits()
  loss = @losses.softmax_cross_entropy()
  optimizer = @optim.optimizer()
  steps = 100
optim.optimizer.groups = {
    'matrices': @matrices/optim.group(),
    'rest': @rest/optim.group(),
}
matrices/optim.group:
  match = '.*kernel'
  optimizer = @optax.contrib.muon()
rest/optim.group:
  match = '.*'
  optimizer = @optax.adamw()
matrices/optax.contrib.muon.learning_rate = 0.02
rest/optax.adamw.learning_rate = 1e-3
"""
YAML = """\
model: !models.mlp
data: !data.digits
loss: !losses.softmax_cross_entropy
steps: 100
optimizer: !optim.optimizer
  groups:
    matrices: !optim.group
      match: .*kernel
      optimizer: !optax.contrib.muon
        learning_rate: 0.02
    rest: !optim.group
      match: .*
      optimizer: !optax.adamw
        learning_rate: 1e-3
"""
# A mistake is a change of either text, (old, new) or a line that is added; what stands in the line
# that the message names; and the message.
RATE_GIN = "rest/optax.adamw.learning_rate = 1e-3"
RATE_YAML = "learning_rate: 1e-3"
ADAMW_YAML = "!optax.adamw\n        learning_rate: 1e-3"
WHOLE_YAML = "!optim.optimizer {groups: {}}"
MISTAKES = {
    "unknown function": (
        (("@optax.adamw()", "@optax.adamww()"), ("rest/optax.adamw.", "rest/optax.adamww.")),
        ("!optax.adamw", "!optax.adamww"),
        "optimizer = @optax.adamww()|!optax.adamww",
        "There is no function 'optax.adamww'. Did you mean 'optax.adamw'?",
    ),
    "function of another package": (
        ("@models.mlp()", "@models.adamw()"),
        ("!models.mlp", "!models.adamw"),
        "models.adamw",
        "There is no function 'models.adamw'. Did you mean 'optax.adamw'?",
    ),
    "name without a package": (
        ("@models.mlp()", "@mlp()"),
        ("!models.mlp", "!mlp"),
        "mlp",
        "There is no function 'mlp'. Did you mean 'models.mlp'? A name begins with optim, optax,",
    ),
    "misspelled package": (
        ("@models.mlp()", "@modles.mlp()"),
        ("!models.mlp", "!modles.mlp"),
        "modles",
        "There is no function 'modles.mlp'. Did you mean 'models.mlp'?",
    ),
    "package that was not named": (
        ("@models.mlp()", "@my_lab.zoo.net()"),
        ("!models.mlp", "!my_lab.zoo.net"),
        "my_lab",
        "If my_lab is a package of yours, add --vocabulary=my_lab to the command",
    ),
    "unknown argument": (
        ("learning_rate = 1e-3", "lerning_rate = 1e-3"),
        (RATE_YAML, "lerning_rate: 1e-3"),
        "lerning_rate",
        "optax.adamw has no argument 'lerning_rate'. Did you mean 'learning_rate'?",
    ),
    "unknown argument that resembles none": (
        "models.mlp.qqqqqqq = 1",
        ("!models.mlp", "!models.mlp {qqqqqqq: 1}"),
        "qqqqqqq",
        "models.mlp has no argument 'qqqqqqq'. It has: ",
    ),
    "unknown argument of the root": (
        ("steps = 100", "stepz = 100"),
        ("steps: 100", "stepz: 100"),
        "stepz",
        "experiment has no argument 'stepz'. Did you mean 'steps'?",
    ),
    "unknown argument of a function with **kwargs": (
        (("@models.mlp()", "@config_zoo.make()"), "config_zoo.make.width = 1"),
        ("!models.mlp", "!config_zoo.make {width: 1}"),
        "width",
        "config_zoo.make has no argument 'width'. It takes no arguments. It takes **kwargs, but a"
        " config",
    ),
    "missing argument": (
        (RATE_GIN, ""),
        (RATE_YAML, ""),
        "@optax.adamw()|!optax.adamw",
        "optax.adamw needs the argument learning_rate: add it.",
    ),
    "missing arguments": (
        (("@models.mlp()", "@config_zoo.needs()"), "config_zoo.needs.b = 1"),
        ("!models.mlp", "!config_zoo.needs {b: 1}"),
        "@config_zoo.needs|!config_zoo.needs",
        "config_zoo.needs needs the arguments a, c: add them.",
    ),
    "call of a class that is passed itself": (
        "experiment.metrics = {'a': @config_zoo.needs()}",
        "metrics: {a: !config_zoo.needs }",
        "config_zoo.needs",
        "config_zoo.needs needs the arguments a, b, c: add them; or, to pass config_zoo.needs"
        " itself without calling it, write @config_zoo.needs in Gin and !partial:config_zoo.needs"
        " {} in YAML.",
    ),
    "call of a function that is passed itself": (
        ("= @losses.softmax_cross_entropy()", "= @config_zoo.needs()"),
        ("!losses.softmax_cross_entropy", "!config_zoo.needs"),
        "config_zoo.needs",
        "or, to pass config_zoo.needs itself without calling it, write @config_zoo.needs in Gin",
    ),
    "argument of a sweep": (
        "experiment.arms = {}",
        "arms: {}",
        "arms",
        "experiment has no argument 'arms'. 'arms' belongs to a sweep: write it in the file of a"
        " sweep, whose base is this config.",
    ),
    "string for a float": (
        ("= 1e-3", "= 'fast'"),
        ("1e-3", "fast"),
        "fast",
        "optax.adamw takes a float or a function for 'learning_rate', and was given the string"
        " 'fast'.",
    ),
    "number in quotes for a float": (
        "rest/optax.adamw.b1 = '0.9'",
        (RATE_YAML, "{learning_rate: 1e-3, b1: '0.9'}"),
        "b1",
        "optax.adamw takes a float for 'b1', and was given the string '0.9'.",
    ),
    "list for a float": (
        ("= 1e-3", "= [1e-3]"),
        ("1e-3", "[1e-3]"),
        "1e-3",
        "optax.adamw takes a float or a function for 'learning_rate', and was given the list"
        " [0.001].",
    ),
    "boolean for a float": (
        "optim.optimizer.clip_norm = True",
        ("  groups:", "  clip_norm: true\n  groups:"),
        "clip_norm",
        "and was given the boolean True.",
    ),
    "boolean for a number of jax": (
        "rest/optax.adamw.b1 = True",
        (RATE_YAML, "{learning_rate: 1e-3, b1: true}"),
        "b1",
        "optax.adamw takes a float for 'b1', and was given the boolean True.",
    ),
    "None in YAML": (
        None,
        ("  groups:", "  clip_norm: None\n  groups:"),
        "clip_norm",
        "was given the string 'None'. The value None is written None in Gin and null in YAML.",
    ),
    "float for an integer": (
        "rest/optim.group.min_ndim = 2.0",
        ("match: .*\n", "match: .*\n      min_ndim: 2.0\n"),
        "min_ndim",
        "optim.group takes an integer for 'min_ndim', and was given the float 2.0.",
    ),
    "misspelled unit": (
        ("steps = 100", "steps = '3 epoks'"),
        ("steps: 100", "steps: 3 epoks"),
        "epoks",
        "was given the string '3 epoks'. A number of steps may also be '5%', '3 epochs', '1_000",
    ),
    "unit where no steps are counted": (
        "models.mlp.width = '50%'",
        ("!models.mlp", "!models.mlp {width: 50%}"),
        "50%",
        "models.mlp takes an integer for 'width', and was given the string '50%'. Only numbers of",
    ),
    "number in quotes": (
        "models.mlp.width = '64'",
        ("!models.mlp", "!models.mlp {width: '64'}"),
        "'64'",
        "and was given the string '64'. A number is written without quotes.",
    ),
    "number for a call": (
        ("    'rest': @rest", "    'x': 3,\n    'rest': @rest"),
        ("    rest: !optim.group", "    x: 3\n    rest: !optim.group"),
        "'x': 3|x: 3",
        "optim.optimizer takes a Group for 'groups.x', and was given the integer 3. A call is"
        " written @name.of.function() in Gin and !name.of.function in YAML.",
    ),
    "function that is not called": (
        ("'rest': @rest/optim.group()", "'rest': @rest/optim.group"),
        ("    rest: !optim.group", "    rest: !partial:optim.group"),
        "rest/optim.group,|rest: !",
        "was given the function optim.group. To pass what optim.group returns, call it:"
        " @optim.group() or !optim.group.",
    ),
    "loss that is not called": (
        ("@losses.softmax_cross_entropy()", "@losses.softmax_cross_entropy"),
        ("!losses.softmax_cross_entropy", "!partial:losses.softmax_cross_entropy {}"),
        "losses.",
        "experiment takes a function for 'loss', and was given the function losses.softmax_cross_"
        "entropy. To pass what losses.softmax_cross_entropy returns, call it: @losses.",
    ),
    "metric that is not called": (
        "experiment.metrics = {'accuracy': @metrics.accuracy}",
        "metrics: {accuracy: !partial:metrics.accuracy {}}",
        "accuracy",
        "takes a class for 'metrics.accuracy', and was given the function metrics.accuracy. To",
    ),
    "schedule that is not called": (
        (("= 1e-3", "= @schedules.warmup_cosine"), "schedules.warmup_cosine.peak_value = 0.1"),
        ("1e-3", "!partial:schedules.warmup_cosine {peak_value: 0.1}"),
        "@schedules.warmup_cosine|!partial",
        "optax.adamw takes a float or a function for 'learning_rate', and was given the function"
        " schedules.warmup_cosine. To pass what schedules.warmup_cosine returns, call it: @",
    ),
    "schedule of optax that is not called": (
        ("= 1e-3", "= @optax.linear_schedule"),
        ("1e-3", "!partial:optax.linear_schedule {}"),
        "optax.linear_schedule",
        "call it: @optax.linear_schedule() or !optax.linear_schedule.",
    ),
    "optimizer for a group": (
        ("    'rest': @rest", "    'x': @rest/optax.adamw(),\n    'rest': @rest"),
        (
            "    rest: !optim.group",
            "    x: !optax.adamw {learning_rate: 0.1}\n    rest: !optim.group",
        ),
        "'x': @|x: ",
        "optim.optimizer takes a Group for 'groups.x', and was given a call of optax.adamw. Call"
        " optim.group to make a group, with optax.adamw as its optimizer.",
    ),
    "optimizer of groups in a group": (
        None,
        (ADAMW_YAML, WHOLE_YAML),
        "!optim.optimizer {",
        "optim.group takes an optimizer for 'optimizer', and was"
        " given a call of optim.optimizer. optim.optimizer updates all parameters of a run, so it"
        " cannot be part of another optimizer: name a single optimizer here, and add groups at",
    ),
    "optimizer of groups in a chain": (
        None,
        (
            "!optax.adamw\n        learning_rate: 1e-3",
            "!optax.chain {args: [!optim.optimizer {groups: {}}]}",
        ),
        "!optim.optimizer {groups",
        "and was given a call of optim.optimizer. optim.optimizer updates all parameters of a run,",
    ),
    "number for a writer": (
        "experiment.writers = ['console', 3]",
        "writers: [console, 3]",
        "writers",
        "experiment takes a string for 'writers[1]', and was given the integer 3.",
    ),
    "string for an optimizer of a chain": (
        (("@optax.adamw()", "@optax.chain()"), (RATE_GIN, "optax.chain.args = ['adam']")),
        (ADAMW_YAML, "!optax.chain {args: [adam]}"),
        "adam",
        "optax.chain takes an optimizer for 'args[0]', and was given the string 'adam'.",
    ),
    "pattern for a mask": (
        "rest/optax.adamw.mask = '.*/kernel'",
        (RATE_YAML, "{learning_rate: 1e-3, mask: .*/kernel}"),
        ".*/kernel",
        "optax.adamw takes a mask for 'mask', and was given the string '.*/kernel'. A mask is a"
        " function of the parameters, or a tree of booleans like theirs. To select parameters by"
        " path, use a group: optim.group(match, optimizer).",
    ),
    "patterns for a mask": (
        "rest/optax.adamw.mask = {'embed': 'yes'}",
        (ADAMW_YAML, "!optax.lars {learning_rate: 1.0, weight_decay_mask: {embed: y}}"),
        "embed",
        "takes a mask for 'mask.embed'|takes a mask for 'weight_decay_mask.embed'",
    ),
    "duplicate binding": (
        "experiment.steps = 200",
        "steps: 200",
        "200",
        "is at a:6. Remove one.|The key 'steps' is given twice; the first is at a:4. Remove one.",
    ),
    "duplicate binding within a block": (
        ("steps = 100", "steps = 100\n  steps = 200"),
        ("match: .*\n", "match: .*\n      match: b\n"),
        "200|match: b",
        "This binds experiment.steps for the second time; the first is at a:6.|"
        "The key 'match' is given twice; the first is at a:12.",
    ),
    "duplicate key of a dict": (
        ("'rest': @rest", "'matrices': @rest"),
        ("    rest: !optim", "    matrices: !optim"),
        "'matrices': @rest|matrices: !optim.group\n      match: .*\n",
        "The key 'matrices' is given twice; the first is at a:8.|The key 'matrices' is given twice;"
        " the first is at a:7.",
    ),
    "duplicate key in one line": (
        "experiment.writers = {'a': 1, 'b': 2, 'a': 1}",
        "writers: {a: 1, b: 2, a: 1}",
        "writers",
        "The key 'a' is given twice; the first is at",
    ),
    "duplicate macro": (
        "m = 1\nexperiment.seed = %m\nm = 2",
        None,
        "m = 2",
        "This binds the macro m for the second time; the first is at a:19.",
    ),
    "undefined macro": (
        ("steps = 100", "steps = %stepz\nsteps = 3"),
        None,
        "%stepz",
        "The macro %stepz is not defined. Did you mean 'steps'? Define it with a line stepz =",
    ),
    "undefined alias": (
        None,
        ("steps: 100", "steps: *steps"),
        "*steps",
        "This is not valid YAML: found undefined alias 'steps'",
    ),
    "unused macro": (
        "lr = 0.1",
        None,
        "lr = 0.1",
        "Nothing reads the macro lr. Use it as %lr, or remove it.",
    ),
    "cyclic macro": (
        "experiment.seed = %a\na = [%b]\nb = %a",
        None,
        "b = %a",
        "The config contains a cycle: %a, %b, %a. Remove one of these references.",
    ),
    "cyclic reference": (
        "models.mlp.sizes = @models.mlp()",
        None,
        "models.mlp.sizes",
        "The config contains a cycle: @models.mlp, @models.mlp. Remove one of these references.",
    ),
    "alias within itself": (
        None,
        "seed: &seed [*seed]",
        "seed: ",
        "This alias is inside its own anchor, so it never ends.",
    ),
    "scope that nothing uses": (
        (RATE_GIN, RATE_GIN.replace("rest", "rset")),
        None,
        "rset",
        "Nothing reads rset/optax.adamw.learning_rate: optax.adamw is never called in the scope"
        " 'rset'; it is called in 'rest'. Did you mean 'rest'?",
    ),
    "binding of a function that is never called": (
        "optax.sgd.momentum = 0.9",
        None,
        "optax.sgd",
        "This config never calls optax.sgd, so nothing reads this.",
    ),
    "binding of a misspelled function": (
        "optax.adamv.b1 = 0.9",
        None,
        "optax.adamv",
        "This config never calls optax.adamv, so nothing reads this. It calls optax.adamw",
    ),
    "misspelled reference": (
        ("@optax.adamw()", "@optax.adamv()"),
        None,
        RATE_GIN,
        "This config never calls optax.adamw, so nothing reads this. It calls optax.adamv"
        " a:16): is one of the two misspelled?",
    ),
    "short name of an argument that does not exist": (
        "rest/adamw.b1o = 0.9",
        None,
        "rest/adamw",
        "optax.adamw has no argument 'b1o'. Did you mean 'b1'?",
    ),
    "short name of two functions that are called": (
        "experiment.x = @optax.contrib.muon()\nmuon.beta = 0.9\nexperiment.y = @optim.muon()",
        None,
        "muon.beta",
        "muon may be any of optax.contrib.muon, optim.muon, which this config calls. Write the",
    ),
    "two spellings of one binding": (
        "rest/optax.adamw.b1 = 0.8\nrest/adamw.b1 = 0.9",
        None,
        "rest/adamw",
        "This binds 'b1' of optax.adamw for the second time; the first is rest/optax.adamw.b1 at",
    ),
    "block of a function that is never called": (
        "optax.sgd:\n  momentum = 0.9",
        None,
        "momentum",
        "This config never calls optax.sgd, so nothing reads this.",
    ),
    "required value": (
        ("steps = 100", "steps = %gin.REQUIRED"),
        None,
        "REQUIRED",
        "This value is required (%gin.REQUIRED): bind it.",
    ),
    "macro that is not read": (
        "experiment.seed = @m/macro\nm = 1",
        None,
        "@m/macro",
        "A macro is read with %m, not with @.",
    ),
    "import": (
        ("experiment:\n", "import my_lab.zoo\nexperiment:\n"),
        None,
        "import",
        "A config cannot import ('import my_lab.zoo'), and need not: functions of optim, optax,",
    ),
    "from import": (
        "from __gin__ import dynamic_registration",
        None,
        "from",
        "remove the line and add --vocabulary=your.package to the command.",
    ),
    "private name": (
        ("@models.mlp()", "@optax._src.alias.adam()"),
        ("!models.mlp", "!optax._src.alias.adam"),
        "_src",
        "optax._src.alias.adam is private ('_src' begins with an underscore): a config names public"
        " functions only.",
    ),
    "private function": (
        ("@models.mlp()", "@models.__import__()"),
        ("!models.mlp", "!models.__import__"),
        "__import__",
        "models.__import__ is private ('__import__' begins with an underscore)",
    ),
    "os.system": (
        (("@models.mlp()", "@os.system()"), "os.system.command = 'exit 1'"),
        ("!models.mlp", "!os.system {command: exit 1}"),
        "@os.system|!os.system",
        "There is no function 'os.system'. A name begins with optim, optax, schedules, models,",
    ),
    "module reached through a package": (
        (("@models.mlp()", "@config_zoo.os.system()"), "config_zoo.os.system.command = 'exit 1'"),
        ("!models.mlp", "!config_zoo.os.system {command: exit 1}"),
        "@config_zoo.os|!config_zoo.os",
        "config_zoo.os.system cannot be used: config_zoo only imports its module os, and a config"
        " names only what a package defines itself.",
    ),
    "module reached through optax": (
        ("@models.mlp()", "@optax.jax.numpy.exp()"),
        ("!models.mlp", "!optax.jax.numpy.exp"),
        "jax",
        "optax has no module 'jax' (optax.jax.numpy.exp).",
    ),
    "function that a package only imports": (
        ("@models.mlp()", "@config_zoo.gcd()"),
        ("!models.mlp", "!config_zoo.gcd"),
        "gcd",
        "config_zoo.gcd is not a function of config_zoo: it comes from math. A config names only"
        " functions that a package defines itself.",
    ),
    "attribute that is no function": (
        ("@models.mlp()", "@config_zoo.number()"),
        ("!models.mlp", "!config_zoo.number"),
        "number",
        "config_zoo.number is neither a function nor a class.",
    ),
    "module for a function": (
        ("@models.mlp()", "@optax.contrib()"),
        ("!models.mlp", "!optax.contrib"),
        "optax.contrib()|!optax.contrib\n",
        "optax.contrib is a module, not a function.",
    ),
    "attribute of a function": (
        ("@models.mlp()", "@models.mlp.__globals__.get()"),
        ("!models.mlp", "!models.mlp.__globals__.get"),
        "__globals__",
        "is private ('__globals__' begins with an underscore)",
    ),
    "method of a class": (
        ("@models.mlp()", "@config_zoo.Thing.grow()"),
        ("!models.mlp", "!config_zoo.Thing.grow"),
        "grow",
        "config_zoo has no module 'Thing' (config_zoo.Thing.grow).",
    ),
    "missing include": (
        "include 'nothing.gin'",
        "include: nothing.yaml",
        "nothing",
        "nothing.gin does not exist.|nothing.yaml does not exist.",
    ),
    "include of the other kind": (
        "include 'a.yaml'",
        "include: a.gin",
        "include",
        "A gin file cannot include|A yaml file cannot include",
    ),
    "include cycle": (
        "include 'a.gin'",
        "include: a.yaml",
        "include",
        "The files include each other: a.gin -> a.gin.|The files include each other: a.yaml ->"
        " a.yaml.",
    ),
    "include of no text": (
        "include 3",
        "include: {a: b}",
        "include",
        "Expected file path as string|include names a file or a list of files, not the dict",
    ),
    "no value": (
        ("steps = 100", "steps ="),
        ("steps: 100", "steps: [1"),
        "steps =|optimizer: !optim.opt",
        "Gin cannot read 'steps =': Unable to parse value.|This is not valid YAML: while parsing a"
        " flow sequence, expected ',' or ']', but got ':'.",
    ),
    "unit without quotes": (
        ("steps = 100", "steps = 5%"),
        ("steps: 100", "steps: %5"),
        "5%|%5",
        "Put a number of steps with a unit in quotes, as in '5%'.|found character '%' that"
        " cannot start any token. Put a string that begins with such a character in quotes",
    ),
    "unit in words without quotes": (
        ("steps = 100", "steps = 3 epochs"),
        None,
        "3 epochs",
        "Put a number of steps with a unit in quotes, as in '5%'.",
    ),
    "string without quotes": (
        "experiment.best_metric = accuracy",
        None,
        "accuracy",
        "Gin cannot read 'experiment.best_metric = accuracy': 'accuracy' is not a value. Put a"
        " string"
        " in quotes, 'accuracy'; a macro is read with %accuracy.",
    ),
    "null of YAML in Gin": (
        "experiment.best_metric = null",
        None,
        "null",
        "'null' is not a value. In Gin it is written None.",
    ),
    "call without its sign": (
        ("@models.mlp()", "models.mlp()"),
        ("!models.mlp", "models.mlp {width: 64}"),
        "models.mlp",
        "'models' is not a value. A call is written @name.of.function() in Gin.|"
        "A call begins with an exclamation mark, as in !models.mlp {width: 64}.",
    ),
    "call of YAML in Gin": (
        ("@models.mlp()", "!models.mlp"),
        None,
        "!models.mlp",
        "Unable to parse value. A call is written @name.of.function() in Gin.",
    ),
    "call of Python": (
        ("@models.mlp()", "@models.mlp(width=64)"),
        ("!models.mlp", "!models.mlp(width=64)"),
        "width=64",
        "Write arguments on lines of their own, as in models.mlp.width = 64, not in the call.|"
        "Write arguments in braces, as in !optax.adamw {learning_rate: 1e-3}.",
    ),
    "arguments without braces": (
        None,
        ("!models.mlp", "!models.mlp width: 64"),
        "width",
        "Write arguments in braces, as in !models.mlp {width: 64}, or on lines of their own below.",
    ),
    "arguments without braces in a line of their own": (
        None,
        ("!models.mlp", "\n  !models.mlp width: 64"),
        "width",
        "Write arguments in braces, as in !models.mlp {width: ...}, or on lines of their own below",
    ),
    "brace without a space": (
        None,
        ("!models.mlp", "!models.mlp{width: 64}"),
        "width",
        "Add a space before the brace.",
    ),
    "argument of Python": (
        None,
        ("!models.mlp", "!models.mlp {width=64}"),
        "width",
        "'width=64' is not the name of an argument. In YAML an argument is written name: value.",
    ),
    "block that is not indented": (
        ("  model = @models.mlp()", "model = @models.mlp()"),
        None,
        "model = ",
        "Indent the bindings of a block below its first line.",
    ),
    "root of Gin in YAML": (
        None,
        "experiment:\n  seed = 3",
        "experiment:",
        "The root of a YAML config is the experiment itself: write model, data, steps and the rest",
    ),
    "reference of Gin in YAML": (
        None,
        ("!models.mlp", "@models.mlp()"),
        "@models",
        "a call is written !optax.adamw {learning_rate: 1e-3}, not @optax.adamw().",
    ),
    "arguments by position": (
        None,
        ("!models.mlp", "!models.mlp [1, 2]"),
        "models.mlp",
        "!models.mlp takes its arguments by name, and was given a list: write !models.mlp"
        " {argument: [...]}, with the argument's name.",
    ),
    "value for arguments": (
        None,
        ("!models.mlp", "!models.mlp 64"),
        "models.mlp",
        "and was given '64'.",
    ),
    "tag of Python": (
        None,
        ("!models.mlp", "!!python/object/apply:os.system ['exit 1']"),
        "os.system",
        "The tag '!!python/object/apply:os.system' does not name a function. Write a call with",
    ),
    "tag that is none": (
        None,
        ("!models.mlp", "!models|mlp"),
        "models|mlp",
        None,
    ),
    "tag that is no name": (
        None,
        ("!models.mlp", "!models-mlp"),
        "models-mlp",
        "The tag '!models-mlp' does not name a function.",
    ),
    "key that is no name": (
        "experiment.writers = {1.5: 'a'}",
        "writers: {1.5: a}",
        "1.5",
        "Keys must be strings or integers, got",
    ),
    "bytes": (
        ("steps = 100", "steps = b'a'"),
        None,
        "b'a'",
        "A config contains strings, numbers, booleans, null, lists and dicts, not bytes.",
    ),
    "complex number": (
        ("steps = 100", "steps = 1j"),
        None,
        "1j",
        "not complex.",
    ),
    "not a number": (
        None,
        ("steps: 100", "steps: .nan"),
        ".nan",
        "The value is NaN, which a config cannot contain.",
    ),
    "too large an integer": (
        ("steps = 100", "steps = 0x1_0000_0000_0000_0000"),
        ("steps: 100", "steps: 18446744073709551616"),
        "steps = 0x1|184467",
        "The integer does not fit into 64 bits.",
    ),
    "tabs": (
        None,
        ("  groups:", "\tgroups:"),
        "groups:",
        "This is not valid YAML: while scanning for the next token, found character '\\t' that"
        " cannot start any token. Write spaces in place of this tab: YAML neither indents nor",
    ),
    "a tab after a colon": (
        None,
        ("steps: 100", "steps:\t100"),
        "steps:",
        "Write spaces in place of this tab",
    ),
}


def changed(text: str, change) -> str:
    """Applies a change, and a second one if there are two."""
    if isinstance(change, str):
        return f"{text}{change}\n"
    if isinstance(change[0], tuple):
        return changed(changed(text, change[0]), change[1])
    old, new = change
    assert old in text
    index = text.rindex(old)
    return text[:index] + new + text[index + len(old) :]


def check(path: Path) -> None:
    Builder(load([path]), vocabulary=["config_zoo"]).check()


@pytest.mark.parametrize(
    ("name", "suffix"),
    [(name, "gin") for name, mistake in MISTAKES.items() if mistake[0] is not None]
    + [(name, "yaml") for name, mistake in MISTAKES.items() if mistake[1] is not None],
)
def test_a_mistake_is_reported_with_its_file_and_line(name, suffix, tmp_path):
    is_yaml = suffix == "yaml"
    *changes, marks, messages = MISTAKES[name]
    text = changed(YAML if is_yaml else GIN, changes[is_yaml])
    path = tmp_path / f"a.{suffix}"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        check(path)
    told = str(caught.value)
    assert len(told.splitlines()) <= 7
    mark = marks.split("|")[is_yaml if "|" in marks else 0]
    line = text[: text.rindex(mark)].count("\n") + 1
    assert told.startswith(f"{path}:{line}: "), told
    if messages is not None:
        message = messages.split("|")[is_yaml if "|" in messages else 0]
        assert message in re.sub(r"\S*/a\.(gin|yaml):", "a:", told)


@pytest.mark.parametrize("text", [GIN, f"# one\n\nsteps = 100\n{GIN}", "experiment.seed = 3\n"])
def test_a_gin_file_named_yaml_is_an_error_that_says_so(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match="looks like Gin, whose|If this is Gin"):
        load([tmp_path / "a.yaml"])


def test_a_yaml_file_named_gin_is_an_error_that_says_so(tmp_path):
    (tmp_path / "a.gin").write_text(YAML)
    with pytest.raises(ConfigError, match="a.gin:1: .* This looks like YAML, whose files end in"):
        load([tmp_path / "a.gin"])


def test_the_config_without_a_mistake_is_accepted(tmp_path):
    for name, text in {"a.gin": GIN, "a.yaml": YAML}.items():
        (tmp_path / name).write_text(text)
        check(tmp_path / name)
