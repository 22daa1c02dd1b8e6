//! Tests of `statehouse policy new` and `build`.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use statehouse_tests::{
    Ran,
    command::{command, finish, finish_within},
    policies, run, run_in,
};
use tempfile::TempDir;

/// A new project in a language, with a rule that can be broken.
struct Project {
    _directory: TempDir,
    path: PathBuf,
    /// The file with the rule.
    source: &'static str,
}

impl Project {
    fn new(lang: &str, source: &'static str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let new = ["policy", "new", "kitchen-rule", "--lang", lang];
        let made = run_in(directory.path(), &new).code(0);
        made.prints(&["statehouse policy build"]);
        let path = directory.path().join("kitchen-rule");
        if lang == "js" {
            let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
            let modules = workspace.join("examples/set-point/js/node_modules");
            let modules = modules.canonicalize().unwrap();
            symlink(modules, path.join("node_modules")).unwrap();
        }
        Self {
            _directory: directory,
            path,
            source,
        }
    }

    fn build(&self) -> Ran {
        let mut build = command(&["policy", "build"]);
        build.current_dir(&self.path);
        policies::with_tools(&mut build);
        finish_within(build, b"", policies::COMPILER_PATIENCE)
    }

    /// Runs `policy test`, which compiles an interpreter for some ten seconds.
    fn test(&self, what: &str) -> Ran {
        let mut test = command(&["policy", "test", "kitchen-rule.wasm", what]);
        test.current_dir(&self.path);
        finish_within(test, b"", policies::COMPILER_PATIENCE)
    }

    /// Builds the project, and checks its transcripts and the options of the standard policy.
    fn check(&self) {
        self.check_build();
        self.write_options();
        let tested = self.test("tests/").code(0).text();
        let expected = "3 transcripts, 9 requests: every line holds, no hidden state\n";
        assert_eq!(tested, expected);
    }

    fn check_build(&self) {
        self.build().code(0).prints(&[
            "wrote ./kitchen-rule.wasm\n",
            "policy     kitchen-rule 1.0.0\n",
            "component\n",
        ]);
    }

    fn write_options(&self) {
        let options = "\
> SET k 20 NX PX 10000
< +OK\\r\\n __ts=$v1
> VDEL k 21
< :-1\\r\\n __ts=$v1
> SCAN k*
< *1\\r\\n*1\\r\\n$1\\r\\nk\\r\\n
";
        fs::write(self.path.join("tests/options.txt"), options).unwrap();
    }

    /// Breaks the rule on purpose.
    fn break_rule(&self, (line, bug): (&str, &str)) {
        let source = self.path.join(self.source);
        let sound = fs::read_to_string(&source).unwrap();
        let broken = sound.replacen(line, bug, 1);
        assert_ne!(broken, sound);
        fs::write(&source, broken).unwrap();
    }

    /// Builds a rule that fails at these keys only, with these causes. Every other line must hold.
    /// An interpreter takes long to build and to compile, so one build shows all.
    fn check_with_crash(&self, bug: (&str, &str), causes: &[(&str, &str)]) {
        self.break_rule(bug);
        self.check_build();
        self.write_options();
        let crash =
            |(key, _): &(&str, &str)| format!("> SET {key} 1\n< \"-ERR internal error\\r\\n\"\n");
        let crashes: String = causes.iter().map(crash).collect();
        fs::write(self.path.join("tests/crash.txt"), crashes).unwrap();
        let tested = self.test("tests/").code(1);
        for ((_, cause), line) in causes.iter().zip((1..).step_by(2)) {
            tested.prints(&[&format!("crash.txt:{line}\n"), cause]);
        }
        let (requests, failures) = (9 + causes.len(), causes.len());
        let expected = format!(
            "4 transcripts, {requests} requests: every line holds, the policy failed at {failures} lines, no hidden state\n"
        );
        assert!(tested.text().ends_with(&expected), "{tested:#?}");
        let (key, cause) = causes[0];
        self.explain_crash(key, cause);
    }

    /// `explain` must show the same cause.
    fn explain_crash(&self, key: &str, cause: &str) {
        let request = ["--policy", "kitchen-rule.wasm", "--", "SET", key, "1"];
        let mut explain = command(&["explain"]);
        explain.args(request).current_dir(&self.path);
        let explained = finish_within(explain, b"", policies::COMPILER_PATIENCE).code(1);
        explained.prints(&[&format!("the policy failed: {cause}")]);
    }

    /// The crash must be reported with its message, file and line.
    fn check_crash(&self, cause: &str) {
        self.test("tests/setpoint.txt").code(1).prints(&[cause]);
    }
}

#[test]
fn new_rust_rule_builds_and_names_its_crash() {
    let project = Project::new("rust", "src/lib.rs");
    project.check();
    // Apart from its own rule, the new policy conforms to the protocol.
    project.test("--conformance").code(0);
    let mut native = Command::new(env!("CARGO"));
    // With --release like the build before, so common dependencies are compiled only once.
    native
        .current_dir(&project.path)
        .args(["test", "--quiet", "--release"]);
    policies::with_tools(&mut native);
    finish_within(native, b"", policies::COMPILER_PATIENCE).code(0);

    project.break_rule((
        "if command.name !=",
        "let _ = &command.key[99..]; if command.name !=",
    ));
    let cause = "src/lib.rs:15: range start index 99 out of range for slice of length 16";
    // No store loads it, but its tests can find the mistake.
    project.build().code(1);
    project.check_crash(cause);
    project.explain_crash("setpoint/kitchen", cause);

    // A failed build prints the compiler's errors and leaves no policy.
    fs::remove_file(project.path.join("kitchen-rule.wasm")).unwrap();
    fs::write(project.path.join("src/lib.rs"), "nonsense").unwrap();
    let build = project.build().code(1);
    build.says("it does not build").says("nonsense");
    assert!(!project.path.join("kitchen-rule.wasm").exists());
}

#[test]
fn new_javascript_rule_builds_and_names_its_crash() {
    let project = Project::new("js", "policy.js");
    let bug = (
        "if (name !==",
        "if (text(key) === 'crash') undefined.there; if (text(key) === 'thrown') { const it = {}; it.it = it; throw it; } if (text(key) === 'clock') Date.now(); if (name !==",
    );
    let crash = "policy.js:14: cannot read property 'there' of undefined";
    // A cyclic value, which has no JSON.
    let thrown = "policy.js: [object Object] is thrown, and is not";
    let clock = "a likely cause is a clock";
    let causes = [("crash", crash), ("thrown", thrown), ("clock", clock)];
    project.check_with_crash(bug, &causes);
}

#[test]
fn new_python_rule_builds_and_names_its_crash() {
    let project = Project::new("python", "src/app.py");
    let bug = (
        "if command.name !=",
        "command.key == b\"crash\" and command.there\n    if command.key == b\"thrown\": raise Err(\"no\")\n    if command.key == b\"exit\": raise SystemExit(1)\n    if command.key == b\"clock\": print()\n    if command.name !=",
    );
    let crash = "app.py:20: AttributeError: 'Command' object has no attribute 'there'";
    let thrown = "app.py:21: Err: no";
    // Regression: it is no `Exception`, and was not logged.
    let exit = "app.py:22: SystemExit: 1";
    let clock = "a likely cause is a clock";
    let causes = [
        ("crash", crash),
        ("thrown", thrown),
        ("exit", exit),
        ("clock", clock),
    ];
    project.check_with_crash(bug, &causes);
}

/// The build tool writes its output into the project. In a shared directory, another user could
/// have taken the name first.
#[test]
fn build_tool_of_javascript_writes_into_the_project_only() {
    let directory = tempfile::tempdir().unwrap();
    let new = ["policy", "new", "rule", "--lang", "js"];
    run_in(directory.path(), &new).code(0);
    let project = directory.path().join("rule");
    let tool = project.join("node_modules/.bin/componentize-qjs");
    fs::create_dir_all(tool.parent().unwrap()).unwrap();
    fs::write(
        &tool,
        "#!/bin/sh\nfor last; do :; done\ncp \"$POLICY\" \"$last\"\n",
    )
    .unwrap();
    fs::set_permissions(&tool, Permissions::from_mode(0o755)).unwrap();
    let before = fs::read_dir(&project).unwrap().count();
    // A build that was stopped leaves its file.
    fs::write(project.join(".unfinished.wasm"), "the beginning").unwrap();
    let build = |policy: &str| {
        let mut build = command(&["policy", "build", "rule"]);
        build
            .current_dir(directory.path())
            .env("POLICY", policy)
            .env("TMPDIR", "/nowhere");
        finish(build, b"")
    };
    let text = build(policies::faulty()).code(0).text();
    assert!(text.starts_with("wrote rule/rule.wasm\n"), "{text}");
    let added = fs::read_dir(&project).unwrap().count() - before;
    assert_eq!(added, 1, "only the policy is left behind");
    // A policy that no store would load.
    let never = directory.path().join("never.wasm");
    fs::write(&never, policies::described("never")).unwrap();
    let built = build(never.to_str().unwrap()).code(1);
    built.prints(&["failed its self-test"]);
}

#[test]
fn policy_new_or_build_failure_names_the_cause() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    run(&["policy", "new", "Not A Name", "--dir", path], b"").fails(2, "lower-case");
    run(&["policy", "new", "a", "--lang", "cobol"], b"").fails(2, "rust");
    run(&["policy", "build", path], b"").fails(2, "no project");
    // The next steps and the error about a missing tool say how to install it.
    for (lang, says) in [
        ("js", "npm install"),
        ("python", "pip install componentize-py"),
    ] {
        let project = directory.path().join(lang);
        let project = project.to_str().unwrap();
        let new = ["policy", "new", "rule", "--lang", lang, "--dir", project];
        run(&new, b"").code(0).prints(&[says]);
        let mut build = command(&["policy", "build", project]);
        build.env("PATH", "/nowhere");
        finish(build, b"").fails(2, says);
    }
    fs::write(directory.path().join("mine"), "").unwrap();
    run(&["policy", "new", "a", "--dir", path], b"").fails(2, "is there already");
}
