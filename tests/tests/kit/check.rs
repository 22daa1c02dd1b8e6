//! Tests of `statehouse policy check` and `bench`.

use std::fs;

use statehouse_tests::{policies, run, run_in};

fn json(arguments: &[&str], code: i32) -> serde_json::Value {
    run(arguments, b"").code(code).object()
}

#[test]
fn policy_check_shows_the_policy_and_command_costs() {
    let checked = run(&["policy", "check", "builtin"], b"").code(0);
    checked.prints(&[
        "policy     standard 1.0.0\n",
        "component\n",
        "signed     no\n",
        "table@1.0.0",
        "exports    handler@1.0.0\n",
        "compiles   in ",
        "+OK",
    ]);
    let it = json(&["policy", "check", "builtin", "--json"], 0);
    assert!(it["memory_bytes"].as_u64().unwrap() > 0, "{it}");
    let commands = it["commands"].as_array().unwrap();
    let command = |name: &str| {
        let found = commands.iter().find(|it| it["command"] == name);
        found.unwrap_or_else(|| panic!("{name} is not in {commands:?}"))
    };
    // Fuel use is the same on every machine, so its order can be compared.
    let fuel = |name: &str| command(name)["fuel"].as_u64().unwrap();
    assert!(0 < fuel("GET") && fuel("GET") < fuel("SET"), "{commands:?}");
    assert_eq!(command("GET")["answer"], "$1\\r\\n0\\r\\n");
    // A core module is also a policy.
    let it = json(&["policy", "check", policies::faulty(), "--json"], 0);
    assert_eq!(it["kind"], "module");
    assert_eq!(it["name"], "faulty");
}

#[test]
fn policy_check_of_a_signed_policy_lists_its_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| format!("{}/{name}", directory.path().display());
    run(&["policy", "keygen", &path("key")], b"").code(0);
    let (key, signed) = (path("key.key"), path("signed.wasm"));
    let sign = ["policy", "sign", "--key", &key, policies::faulty()];
    run(&[&sign[..], &["-o", &signed]].concat(), b"").code(0);
    let it = json(&["policy", "check", &signed, "--json"], 0);
    assert_eq!(it["signed_by"].as_array().unwrap().len(), 1, "{it}");
}

#[test]
fn policy_check_of_a_wrong_file_explains_and_advises() {
    let directory = tempfile::tempdir().unwrap();
    // An empty core module and an empty component. The components below import WASI and another
    // version of the contract.
    let empty = b"\0asm\x01\0\0\0".to_vec();
    let component = b"\0asm\x0d\0\x01\0".to_vec();
    let whole = fs::read(policies::faulty()).unwrap();
    let cases: [(&str, Vec<u8>, &str, &str); 7] = [
        (
            "half",
            whole[..whole.len() / 2].to_vec(),
            "ends in the middle",
            "once more",
        ),
        (
            "text",
            b"fn main() {}".to_vec(),
            "not WebAssembly",
            "statehouse policy build",
        ),
        (
            "nothing",
            Vec::new(),
            "not WebAssembly",
            "name the .wasm file",
        ),
        (
            "module",
            empty.clone(),
            "does not export",
            "statehouse_policy::export!",
        ),
        (
            "component",
            component.clone(),
            "does not export",
            "statehouse policy new",
        ),
        (
            "wasi",
            importing(&component, "wasi:clocks/monotonic-clock@0.2.6"),
            "wasi:clocks/monotonic-clock@0.2.6",
            "--stub-wasi",
        ),
        (
            "newer",
            importing(&component, "statehouse:policy/table@2.0.0"),
            "statehouse:policy/table@2.0.0",
            "contract that this host offers",
        ),
    ];
    for (name, bytes, what, advice) in cases {
        let path = directory.path().join(name);
        fs::write(&path, bytes).unwrap();
        let path = path.to_str().unwrap();
        let it = json(&["policy", "check", path, "--json"], 1);
        assert!(it["error"].as_str().unwrap().contains(what), "{name}: {it}");
        assert!(it["advice"].to_string().contains(advice), "{name}: {it}");
        let text = run(&["policy", "check", path], b"").code(1).text();
        assert!(text.starts_with("refused  "), "{name}: {text}");
        assert!(text.contains(advice), "{name}: {text}");
    }
    run(&["policy", "check", "/no/such/file"], b"").fails(2, "/no/such/file");
}

/// Regression: these commands accepted the file, and only a load refused it.
#[test]
fn policy_that_no_store_loads_fails_check_and_start() {
    let directory = tempfile::tempdir().unwrap();
    for (word, why) in [
        ("reserved", "reserved for the built-in policy"),
        ("never", "failed its self-test"),
    ] {
        let file = directory.path().join(word);
        fs::write(&file, policies::described(word)).unwrap();
        let file = file.to_str().unwrap();
        let it = json(&["policy", "check", file, "--json"], 1);
        assert!(it["error"].as_str().unwrap().contains(why), "{it}");
        let serve = ["serve", "--check", "--policy", file];
        run_in(directory.path(), &serve).fails(2, why);
    }
    run_in(directory.path(), &["policy", "new", "builtin"]).fails(2, "is not `builtin`");
    assert!(!directory.path().join("builtin").exists());
}

/// Returns a component that imports an empty instance under this name.
fn importing(component: &[u8], name: &str) -> Vec<u8> {
    let mut out = component.to_vec();
    // A type section with one instance type that has no declarations.
    out.extend([7, 3, 1, 0x42, 0]);
    // An import section with one import: a plain name, an instance of type 0.
    let length = u8::try_from(name.len()).unwrap();
    out.extend([10, length + 5, 1, 0, length]);
    out.extend(name.bytes());
    out.extend([5, 0]);
    out
}

#[test]
fn policy_bench_compares_a_policy_with_the_built_in_one() {
    let directory = tempfile::tempdir().unwrap();
    let transcript = directory.path().join("it.txt");
    fs::write(&transcript, "> SET k v\n> GET k\n> COUNT k\n").unwrap();
    let transcript = transcript.to_str().unwrap();
    let faulty = policies::faulty();
    let arguments = [
        "policy",
        "bench",
        "builtin",
        "--against",
        faulty,
        "--transcript",
        transcript,
    ];
    run(&arguments, b"").code(0).prints(&[
        "GET of 64 B",
        "SET of 4 KiB",
        "a fresh instance",
        "COUNT in ",
        "faulty failed at SET of 64 B",
        "faulty failed at SET in ",
    ]);
    fs::write(transcript, "> GET k\nnonsense\n").unwrap();
    let bench = ["policy", "bench", "builtin", "--transcript", transcript];
    run(&bench, b"").fails(2, "it.txt: line 2");
    let it = json(&["policy", "bench", "builtin", "--json"], 0);
    let get = &it["rows"][0];
    assert_eq!(get["what"], "GET of 64 B");
    // Both columns are the same module, so both use the same fuel.
    assert_eq!(get["costs"][0]["fuel"], get["costs"][1]["fuel"]);
    assert!(get["costs"][0]["ns"].as_u64().unwrap() > 0);
}
