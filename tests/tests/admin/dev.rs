//! Tests `statehouse policy dev`.

use std::{fs, fs::Permissions, os::unix::fs::PermissionsExt, path::Path};

use statehouse_tests::{Server, policies, run_in};

use crate::logs::background;
use crate::{OURS, answers, listing, ours, roles, until};

/// A project whose build tool copies `policy.js`, so that its policy is what this test writes
/// there.
fn project(directory: &Path, policy: &Path) {
    let new = ["policy", "new", "rule", "--lang", "js", "--dir", "project"];
    run_in(directory, &new).code(0);
    let project = directory.join("project");
    let tool = project.join("node_modules/.bin/componentize-qjs");
    fs::create_dir_all(tool.parent().unwrap()).unwrap();
    fs::write(
        &tool,
        "#!/bin/sh\nfor last; do :; done\ncp policy.js \"$last\"\n",
    )
    .unwrap();
    fs::set_permissions(&tool, Permissions::from_mode(0o755)).unwrap();
    let transcript = "> SET k fine\n< +OK\\r\\n __ts=$v1\n";
    fs::write(project.join("tests/setpoint.txt"), transcript).unwrap();
    fs::remove_file(project.join("tests/others.txt")).unwrap();
    fs::copy(policy, project.join("policy.js")).unwrap();
}

#[test]
fn saved_project_is_built_tested_and_promoted() {
    let server = Server::start();
    let source = server.directory().join("project/policy.js");
    project(server.directory(), Path::new(&ours()));
    let dev = background(&server, &["dev", "project"]);
    dev.wait_for("promoted marked-ship");
    assert!(answers(&server, "tally"));

    // A policy that fails a transcript is not loaded: `faulty` answers without a version.
    fs::copy(policies::faulty(), &source).unwrap();
    dev.wait_for("1 line differs");
    assert!(answers(&server, "tally"));
    assert_eq!(roles(&server, "faulty"), None);

    // The next good build is promoted, and the build before is unloaded.
    fs::copy(policies::marked("dock"), &source).unwrap();
    dev.wait_for("promoted marked-dock");
    assert_eq!(roles(&server, "marked-dock").unwrap(), ["active"]);
    until("the replaced build is unloaded", || {
        roles(&server, OURS).is_none()
    });
    assert_eq!(listing(&server)["policies"].as_array().unwrap().len(), 2);
}

/// Regression: such a build was loaded only after another save.
#[test]
fn build_without_a_store_is_loaded_when_the_store_answers() {
    let mut server = Server::start();
    let source = server.directory().join("project/policy.js");
    project(server.directory(), Path::new(&ours()));
    let dev = background(&server, &["dev", "project"]);
    dev.wait_for("promoted marked-ship");
    server.stop();
    fs::copy(policies::marked("dock"), &source).unwrap();
    until("the new build is tested", || {
        let lines = dev.lines.all();
        lines
            .iter()
            .filter(|it| it.contains("every line holds"))
            .count()
            >= 2
    });
    server.restart();
    dev.wait_for("promoted marked-dock");
    assert_eq!(roles(&server, "marked-dock").unwrap(), ["active"]);
}
