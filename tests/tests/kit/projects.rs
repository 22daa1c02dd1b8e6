//! Tests of `statehouse policy new` and `build`.

use std::{
    env,
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use statehouse_tests::{
    command::{command, finish, finish_within},
    policies, run, run_in,
};

/// The target directory of the projects: `target/tmp/projects`, from
/// `target/<profile>/deps/<test>`. It is kept between runs, so only a first run compiles the
/// dependencies of the projects.
fn target() -> PathBuf {
    let test = env::current_exe().unwrap();
    test.ancestors().nth(3).unwrap().join("tmp/projects")
}

/// A first run compiles the dependencies of the projects, perhaps while other tests compile too.
const COMPILER_PATIENCE: Duration = Duration::from_secs(600);

#[test]
fn new_rust_policy_builds_and_passes_its_tests() {
    let directory = tempfile::tempdir().unwrap();
    let ran = run_in(directory.path(), &["policy", "new", "kitchen-rule"], b"").code(0);
    assert!(
        ran.text().contains("statehouse policy build"),
        "{}",
        ran.text()
    );
    let project = directory.path().join("kitchen-rule");
    let mut build = command(&["policy", "build", "--offline"]);
    build
        .current_dir(&project)
        .env("CARGO_TARGET_DIR", target());
    let text = finish_within(build, b"", COMPILER_PATIENCE).code(0).text();
    for part in [
        "wrote ./kitchen-rule.wasm\n",
        "policy     kitchen-rule 0.1.0\n",
        "component\n",
    ] {
        assert!(text.contains(part), "{part}\n---\n{text}");
    }
    let tested = ["policy", "test", "kitchen-rule.wasm", "tests/"];
    let ran = run_in(&project, &tested, b"").code(0);
    assert_eq!(
        ran.text(),
        "2 transcripts, 6 requests: every line holds, no hidden state\n"
    );
    // Apart from its own rule, the new policy conforms to the protocol.
    let conforms = ["policy", "test", "kitchen-rule.wasm", "--conformance"];
    run_in(&project, &conforms, b"").code(0);
    let mut native = Command::new(env!("CARGO"));
    native
        .current_dir(&project)
        // With --release like the build before, so common dependencies are compiled only once.
        .args(["test", "--quiet", "--offline", "--release"])
        .env("CARGO_TARGET_DIR", target());
    finish_within(native, b"", COMPILER_PATIENCE).code(0);

    // A failed build prints the compiler's errors and leaves no policy.
    fs::remove_file(project.join("kitchen-rule.wasm")).unwrap();
    fs::write(project.join("src/lib.rs"), "nonsense").unwrap();
    let mut build = command(&["policy", "build", "--offline"]);
    build
        .current_dir(&project)
        .env("CARGO_TARGET_DIR", target());
    finish(build, b"")
        .code(1)
        .says("it does not build")
        .says("nonsense");
    assert!(!project.join("kitchen-rule.wasm").exists());
}

/// Builds a new project in this language with the tools that `tests/run` installs, and checks its
/// rule: the transcript of the template, the protocol for all other keys, and a deliberate crash in
/// `source`, whose message, file and line must be reported.
fn check_rule(lang: &str, source: &str, (line, bug): (&str, &str), cause: &str) {
    let directory = tempfile::tempdir().unwrap();
    let new = ["policy", "new", "rule", "--lang", lang];
    run_in(directory.path(), &new, b"").code(0);
    let project = directory.path().join("rule");
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    if lang == "js" {
        let modules = workspace.join("examples/set-point/js/node_modules");
        symlink(
            modules.canonicalize().unwrap(),
            project.join("node_modules"),
        )
        .unwrap();
    }
    let tools = workspace.join("target/venv/bin").canonicalize().unwrap();
    let path = format!("{}:{}", tools.display(), env::var("PATH").unwrap());
    let build = || {
        let mut build = command(&["policy", "build"]);
        build.current_dir(&project).env("PATH", &path);
        finish_within(build, b"", COMPILER_PATIENCE).code(0)
    };
    let text = build().text();
    assert!(text.contains("policy     rule 1.0.0\n"), "{text}");
    // The rule has all commands of the standard policy, and all their options.
    fs::write(
        project.join("tests/options.txt"),
        "> SET k 20 NX PX 10000\n< +OK\\r\\n __ts=$v1\n> VDEL k 21\n< :-1\\r\\n\n> SCAN *\n",
    )
    .unwrap();
    let update = [
        "policy",
        "test",
        "rule.wasm",
        "tests/options.txt",
        "--update",
    ];
    run_in(&project, &update, b"").code(0);
    let tested = ["policy", "test", "rule.wasm", "tests/"];
    let text = run_in(&project, &tested, b"").code(0).text();
    assert!(text.contains("every line holds, no hidden state"), "{text}");

    let source = project.join(source);
    let sound = fs::read_to_string(&source).unwrap();
    let broken = sound.replacen(line, bug, 1);
    assert_ne!(broken, sound);
    fs::write(&source, broken).unwrap();
    build();
    let text = run_in(&project, &tested, b"").code(1).text();
    assert!(text.contains(cause), "{text}");
    let explain = ["explain", "--policy", "rule.wasm", "--", "SET", "k", "1"];
    let text = run_in(&project, &explain, b"").code(1).text();
    assert!(
        text.contains(&format!("the policy failed: {cause}")),
        "{text}"
    );
}

#[test]
fn new_javascript_rule_builds_and_names_its_crash() {
    check_rule(
        "js",
        "policy.js",
        ("if (name !==", "undefined.there; if (name !=="),
        "policy.js:12: cannot read property 'there' of undefined",
    );
}

#[test]
fn new_python_rule_builds_and_names_its_crash() {
    check_rule(
        "python",
        "src/app.py",
        (
            "if command.name !=",
            "command.there\n    if command.name !=",
        ),
        "app.py:20: AttributeError: 'Command' object has no attribute 'there'",
    );
}

/// The build tool writes its output into the project. In a shared directory, another user could
/// have taken the name first.
#[test]
fn build_tool_of_javascript_writes_into_the_project_only() {
    let directory = tempfile::tempdir().unwrap();
    let new = ["policy", "new", "rule", "--lang", "js"];
    run_in(directory.path(), &new, b"").code(0);
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
    let mut build = command(&["policy", "build", "rule"]);
    build
        .current_dir(directory.path())
        .env("POLICY", policies::faulty())
        .env("TMPDIR", "/nowhere");
    let text = finish(build, b"").code(0).text();
    assert!(text.starts_with("wrote rule/rule.wasm\n"), "{text}");
    let added = fs::read_dir(&project).unwrap().count() - before;
    assert_eq!(added, 1, "only the policy is left behind");
}

#[test]
fn policy_new_or_build_failure_names_the_cause() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    run(&["policy", "new", "Not A Name", "--dir", path], b"")
        .code(2)
        .says("lower-case");
    run(&["policy", "new", "a", "--lang", "cobol"], b"")
        .code(2)
        .says("rust");
    run(&["policy", "build", path], b"")
        .code(2)
        .says("no project");
    // The error about a missing tool says how to install it.
    for (lang, says) in [
        ("js", "npm install"),
        ("python", "pip install componentize-py"),
    ] {
        let project = directory.path().join(lang);
        let project = project.to_str().unwrap();
        run(
            &["policy", "new", "rule", "--lang", lang, "--dir", project],
            b"",
        )
        .code(0);
        let mut build = command(&["policy", "build", project]);
        build.env("PATH", "/nowhere");
        finish(build, b"").code(2).says(says);
    }
    fs::write(directory.path().join("mine"), "").unwrap();
    run(&["policy", "new", "a", "--dir", path], b"")
        .code(2)
        .says("is there already");
}
