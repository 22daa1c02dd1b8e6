//! Tests what `host/dist` installs: the settings of its files, the Debian package and the image.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde_json::Value;
use statehouse_tests::{
    Server, assert_contains, binary, command,
    command::finish_within,
    run,
    small::{FileSystem, Small},
};

/// Building a package or a static program takes minutes.
const PATIENCE: Duration = Duration::from_secs(1800);

fn dist(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../host/dist")
        .join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(dist(name)).unwrap()
}

/// Checks settings below a directory. Files of the operator are missing, and nothing else is wrong.
fn assert_usable(mut serve: Command, name: &str) {
    serve.args(["serve", "--check"]);
    let ran = finish_within(serve, b"", Duration::from_secs(60));
    let of_operator = ["/tls", "/users", "/server", "/etcd-"];
    for line in ran.stderr.lines() {
        let is_missing_file = line.contains("No such file") || line.contains("cannot read");
        let is_known = is_missing_file && of_operator.iter().any(|it| line.contains(it));
        assert!(is_known || line.contains("note: "), "{name}: {ran:#?}");
    }
}

/// The arguments that the compiler gets from `host/dist/rustc`.
fn compiled_with(arguments: &str, pgo: &str) -> String {
    let mut rustc = Command::new(dist("rustc"));
    rustc.arg("echo").args(arguments.split(' ')).envs([
        ("CARGO_PKG_NAME", "bytes"),
        ("CARGO_PKG_VERSION", "1.0.0"),
        ("CARGO_CRATE_NAME", "bytes"),
        ("CARGO_BIN_NAME", ""),
        ("STATEHOUSE_PGO", pgo),
    ]);
    let output = rustc.output().unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .trim_end()
        .to_owned()
}

#[test]
fn only_the_request_path_is_compiled_with_the_counts() {
    const OPTIMIZED: &str = "--crate-name bytes -C opt-level=3 -C codegen-units=1 -C metadata=01";
    assert!(dist("request-path.profdata").is_file());
    let used = compiled_with(OPTIMIZED, "");
    assert_contains!(
        used,
        "-Cprofile-use=",
        "/request-path.profdata ",
        "metadata=bytes-1.0.0-bytes-"
    );
    let counted = compiled_with(OPTIMIZED, "/counts");
    assert!(counted.ends_with("-Cprofile-generate=/counts"), "{counted}");
    assert_eq!(compiled_with(OPTIMIZED, "off"), OPTIMIZED);
    for other in [
        "--crate-name clap -C opt-level=1 -C metadata=01",
        &format!("{OPTIMIZED} --test x"),
        &format!("{OPTIMIZED} --target wasm32-unknown-unknown"),
    ] {
        assert_eq!(compiled_with(other, ""), other);
    }
}

#[test]
fn settings_of_the_installed_files_are_those_of_this_version() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let manifest = read("kubernetes.yaml");
    let (_, settings) = manifest.split_once("statehouse.toml: |\n").unwrap();
    let (settings, _) = settings.split_once("---").unwrap();
    for (name, text) in [
        ("statehouse.toml", read("statehouse.toml")),
        // The address of a gateway is not one of this machine.
        (
            "cluster/statehouse.toml",
            read("cluster/statehouse.toml").replace("10.0.0.1:7883", "127.0.0.1:7883"),
        ),
        ("kubernetes.yaml", settings.replace("    ", "")),
    ] {
        let path = directory.path().join("settings.toml");
        fs::write(&path, text).unwrap();
        let mut serve = command(&[]);
        serve.env("STATEHOUSE_CONFIG", &path);
        serve.env("STATEHOUSE_DATA", &data);
        assert_usable(serve, name);
    }
    let help = run(&["serve", "--help"], b"").text();
    for name in ["compose.yaml", "kubernetes.yaml", "cluster/kubernetes.yaml"] {
        let mut serve = command(&[]);
        let mut count = 0;
        for (variable, value) in variables(&read(name)) {
            let is_secret = variable == "STATEHOUSE_ADMIN_TOKEN";
            assert!(
                is_secret || help.contains(&format!("[env: {variable}=")),
                "{name}: {variable}"
            );
            serve.env(variable, value);
            count += 1;
        }
        assert!(count > 1, "{name}");
        serve.env("STATEHOUSE_DATA", &data);
        assert_usable(serve, name);
    }
    assert!(!data.exists());
}

/// The variables of a manifest: `{name: X, value: "V"}`, or `X: "V"`. One without a value is set by
/// the cluster.
fn variables(manifest: &str) -> Vec<(String, String)> {
    let all = manifest.lines().map(str::trim).filter_map(|line| {
        let line = line.trim_start_matches("- {name: ").trim_end_matches('}');
        let end = line.find([',', ':'])?;
        let name = line.get(..end)?.to_owned();
        let (_, value) = line.split_once("value: ").or(line.split_once(": "))?;
        let value = match line.contains("valueFrom") {
            true => "a-long-value-of-the-cluster".to_owned(),
            false => value.trim_matches('"').replace("$(STATEHOUSE_NAME)", "gw1"),
        };
        name.starts_with("STATEHOUSE_").then_some((name, value))
    });
    all.collect()
}

/// The exit codes after which systemd must not start the store again: a later start would fail in
/// the same way, or take the client id back.
#[test]
fn unit_restarts_the_store_after_every_passing_failure() {
    for name in ["statehouse.service", "cluster/etcd.service"] {
        let unit = read(name);
        let (before_service, _) = unit.split_once("[Service]").unwrap();
        assert!(
            before_service.contains("StartLimitIntervalSec=0\n"),
            "{name}"
        );
    }
    let unit = read("statehouse.service");
    assert!(unit.contains("\nRestartPreventExitStatus=2 65 76 78\n"));
    assert!(unit.contains("\nAfter=network-online.target time-sync.target\n"));
}

/// The image runs as this account, and the root of a volume usually belongs to root.
#[test]
fn pods_of_the_store_own_their_volume_and_have_time_to_stop() {
    for name in ["kubernetes.yaml", "cluster/kubernetes.yaml"] {
        let manifest = read(name);
        for line in [
            "terminationGracePeriodSeconds: 60",
            "runAsUser: 64883",
            "fsGroup: 64883",
            "{name: STATEHOUSE_DATA, value: /data/store}",
        ] {
            assert!(manifest.contains(line), "{name}: {line}");
        }
        let count = |text: &str| manifest.matches(text).count();
        for line in [
            "allowPrivilegeEscalation: false",
            "readOnlyRootFilesystem: true",
            "capabilities: {drop: [ALL]}",
            "limits: {memory: ",
            "runAsNonRoot: true",
            "automountServiceAccountToken: false",
        ] {
            assert_eq!(count(line), count(" image: "), "{name}: {line}");
        }
    }
}

/// The loss, or the drain, of one node must leave the store its majority. A job that remained, or
/// that failed because the cluster exists, would keep out the next version.
#[test]
fn cluster_survives_its_nodes_and_its_upgrades_in_kubernetes() {
    let manifest = read("cluster/kubernetes.yaml");
    let parts = |kind: &str| -> Vec<&str> {
        let kind = format!("\nkind: {kind}\n");
        let parts = manifest.split("\n---\n");
        parts.filter(|it| it.contains(&kind)).collect()
    };
    let sets = parts("StatefulSet");
    assert_eq!(sets.len(), 2);
    for set in sets {
        let (_, rest) = set.split_once("metadata: {name: ").unwrap();
        let (name, _) = rest.split_once('}').unwrap();
        let labels = format!("{{matchLabels: {{app: {name}}}}}");
        let (_, apart) = set.split_once("podAntiAffinity:").expect(name);
        assert!(apart.contains(&format!("labelSelector: {labels}")), "{set}");
        let budgets = parts("PodDisruptionBudget");
        let mut budgets = budgets.iter().filter(|it| it.contains(&labels));
        let budget = budgets.next().expect(name);
        assert!(budget.contains("\n  maxUnavailable: 1\n"), "{budget}");
        // A pod without a probe counts as available as soon as its process runs.
        assert_contains!(set, "\n          readinessProbe: {httpGet: ");
        // The pods find each other before they are ready.
        let peers = format!("publishNotReadyAddresses: true\n  selector: {{app: {name}}}\n");
        assert!(manifest.contains(&peers), "{name}");
    }
    let jobs = parts("Job");
    let [job] = &jobs[..] else { panic!("one job") };
    assert!(job.contains("[statehouse, cluster, init, --if-missing]"));
    assert!(job.contains("\n  ttlSecondsAfterFinished: "));
}

/// A store with a full disk is not ready, but serves reads and removals.
#[test]
fn service_of_one_pod_serves_clients_while_it_is_not_ready() {
    let manifest = read("kubernetes.yaml");
    let parts = manifest.split("\n---\n");
    let mut services = parts.filter(|it| it.contains("\nkind: Service\n"));
    let service = services.next().unwrap();
    assert_contains!(service, "\n  publishNotReadyAddresses: true\n");
    assert_eq!(services.next(), None);
}

/// A host that waits for etcd does not answer its probes.
#[test]
fn pods_of_the_store_are_not_ended_while_they_start() {
    for name in ["kubernetes.yaml", "cluster/kubernetes.yaml"] {
        let manifest = read(name);
        let count = |text: &str| manifest.matches(text).count();
        assert!(count("livenessProbe:") > 0, "{name}");
        assert_eq!(count("startupProbe:"), count("livenessProbe:"), "{name}");
    }
}

/// Data of another program may be mounted below the data directory.
#[test]
fn purge_leaves_mounted_file_systems() {
    let Some(mounted) = Small::mount(FileSystem::Tmpfs, 1) else {
        return;
    };
    let data = mounted.path().parent().unwrap();
    fs::write(data.join("journal"), "").unwrap();
    fs::write(mounted.path().join("other"), "").unwrap();
    let place = tempfile::tempdir().unwrap();
    // The script must not change accounts and services of this machine.
    for (name, text) in [
        ("getent", "#!/bin/sh\nexit 2\n"),
        ("deb-systemd-helper", "#!/bin/sh\n"),
    ] {
        let path = place.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let text = read("debian/postrm")
        .replace("/var/lib/statehouse", data.to_str().unwrap())
        .replace(
            "/etc/statehouse",
            place.path().join("settings").to_str().unwrap(),
        );
    let script = place.path().join("postrm");
    fs::write(&script, text).unwrap();
    let path = std::env::var("PATH").unwrap();
    let mut purge = Command::new("sh");
    purge.arg(&script).arg("purge");
    purge.env("PATH", format!("{}:{path}", place.path().display()));
    finish_within(purge, b"", Duration::from_secs(60)).code(0);
    assert!(!data.join("journal").exists());
    assert!(mounted.path().join("other").exists());
}

/// The links of a document that lead to files, relative to its directory.
fn links(document: &str) -> Vec<&str> {
    let targets = document
        .split("](")
        .skip(1)
        .filter_map(|it| it.split_once(')'));
    let targets = targets.map(|it| it.0.split('#').next().unwrap());
    let is_file = |it: &&str| !it.is_empty() && !it.contains("://") && !it.contains(' ');
    targets.filter(is_file).collect()
}

fn script(name: &str, arguments: &[&str]) -> String {
    let mut script = Command::new("bash");
    script.arg(dist(name)).args(arguments);
    script.env("DPKG_DEB_COMPRESSOR_TYPE", "gzip");
    let text = finish_within(script, b"", PATIENCE).code(0).text();
    text.trim().to_owned()
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().unwrap();
    id.stdout == b"0\n"
}

#[test]
#[ignore = "packs a program of a hundred megabytes"]
fn package_installs_a_program_that_runs_as_its_unit_does() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let architecture = Command::new("dpkg").arg("--print-architecture").output();
    let architecture = String::from_utf8(architecture.unwrap().stdout).unwrap();
    let program = binary::statehouse().canonicalize().unwrap();
    let (architecture, program) = (architecture.trim(), program.to_str().unwrap());
    let from = ["--arch", architecture, "--binary", program];
    let package = script("package", &[&from[..], &["--out", place]].concat());
    let root = directory.path().join("root");
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("--extract").arg(package).arg(&root);
    finish_within(unpack, b"", PATIENCE).code(0);
    for file in [
        "usr/share/man/man1/statehouse-serve.1.gz",
        "usr/share/bash-completion/completions/statehouse",
        "usr/share/zsh/vendor-completions/_statehouse",
        "usr/share/fish/vendor_completions.d/statehouse.fish",
        "usr/share/statehouse/prometheus/rules.yml",
        "usr/share/statehouse/grafana/statehouse.json",
        "usr/share/doc/statehouse/copyright",
        "usr/share/doc/statehouse/changelog.Debian.gz",
        "usr/share/doc/statehouse/docs/trust/rules.toml",
        "usr/share/doc/statehouse/docs/foreign-brokers/mosquitto.conf",
    ] {
        assert!(root.join(file).metadata().unwrap().len() > 0, "{file}");
    }
    let documents = root.join("usr/share/doc/statehouse");
    for directory in [documents.clone(), documents.join("docs")] {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|it| it == "md") {
                let text = fs::read_to_string(&path).unwrap();
                for link in links(&text) {
                    let is_there = directory.join(link).exists();
                    assert!(is_there, "{}: {link}", path.display());
                }
            }
        }
    }
    let unit = root.join("usr/lib/systemd/system/statehouse.service");
    let unit = fs::read_to_string(unit).unwrap();
    let start = unit
        .lines()
        .find_map(|it| it.strip_prefix("ExecStart="))
        .unwrap();
    let words: Vec<&str> = start.split(' ').collect();
    assert_eq!(words[1..3], ["serve", "--config"]);
    let in_root = |path: &str| root.join(path.trim_start_matches('/'));
    let mut serve = Command::new(in_root(words[0]));
    serve.arg("serve").arg("--config").arg(in_root(words[3]));
    serve.args(["--listen", "127.0.0.1:0", "--data", "data"]);
    let server = Server::spawn(serve, directory);
    server.store("a").set("key", "value");
}

/// Unpacks the one layer of an image. Returns its root and its configuration.
fn unpack(image: &Path, directory: &Path) -> (PathBuf, Value) {
    let (files, root) = (directory.join("image"), directory.join("root"));
    let untar = |archive: &Path, to: &Path| {
        fs::create_dir(to).unwrap();
        let mut tar = Command::new("tar");
        tar.arg("-xpf").arg(archive).arg("-C").arg(to);
        finish_within(tar, b"", PATIENCE).code(0);
    };
    untar(image, &files);
    let json = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(files.join(name)).unwrap()).unwrap()
    };
    let manifest = json("manifest.json");
    let layers = manifest[0]["Layers"].as_array().unwrap();
    assert_eq!(layers.len(), 1, "{manifest}");
    untar(&files.join(layers[0].as_str().unwrap()), &root);
    (root, json(manifest[0]["Config"].as_str().unwrap()))
}

#[test]
#[ignore = "builds a static program"]
fn image_serves_as_its_account_and_keeps_its_volume() {
    if !is_root() {
        println!("only root can change the root directory, so the image was not started");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = match std::env::var("STATEHOUSE_STATIC_BIN") {
        Ok(path) => path,
        Err(_) => {
            let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
            let built = script("build", &[&target, "--profile", "dev"]);
            dist("../..").join(built).display().to_string()
        }
    };
    let image = directory.path().join("image.tar");
    script(
        "image",
        &["--binary", &program, "--out", image.to_str().unwrap()],
    );
    let (root, config) = unpack(&image, directory.path());
    let config = &config["config"];
    let words = |of: &Value| -> Vec<String> { serde_json::from_value(of.clone()).unwrap() };
    assert_eq!(config["User"], "64883:64883");
    let in_image = |arguments: &[String]| {
        // The PATH of the image would be searched.
        let mut command = Command::new("/usr/sbin/chroot");
        command.arg("--userspec=64883:64883").arg(&root);
        command.args(words(&config["Entrypoint"])).args(arguments);
        let variables = words(&config["Env"]);
        let variables = variables.iter().filter_map(|it| it.split_once('='));
        command.env_clear().envs(variables);
        // Other tests may use the port of the image.
        command.env("STATEHOUSE_METRICS", "127.0.0.1:0");
        command
    };
    let probe = || {
        let health = words(&config["Healthcheck"]["Test"]);
        assert_eq!(health[0], "CMD");
        assert_eq!(health[1..2], words(&config["Entrypoint"]));
        finish_within(in_image(&health[2..]), b"", PATIENCE)
    };
    let mut serve = in_image(&words(&config["Cmd"]));
    serve.args(["--listen", "127.0.0.1:0"]);
    let mut server = Server::spawn(serve, directory);
    server.store("a").set("key", "value");
    assert_eq!(probe().code(0).text(), "ready\n");
    server.stop();
    probe().code(3);
    server.restart();
    assert_eq!(server.store("a").get("key"), Some(b"value".to_vec()));
}
