//! Builds the standard policy in `guest/` for wasm32-unknown-unknown, makes it a component and leaves
//! it in OUT_DIR, where the library embeds it. A change of any source of the guest comes in with the next
//! plain `cargo build` or `cargo run`.
//!
//! `STATEHOUSE_POLICY_COMPONENT=FILE` takes a component that was built elsewhere instead: for packagers,
//! and for machines that cannot have the target.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::{env, fs};

const TARGET: &str = "wasm32-unknown-unknown";
const READY_MADE: &str = "STATEHOUSE_POLICY_COMPONENT";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={READY_MADE}");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    list_sources(&out)?;
    let embedded = out.join("standard.wasm");

    if let Some(ready_made) = env::var_os(READY_MADE) {
        println!(
            "cargo::rerun-if-changed={}",
            Path::new(&ready_made).display()
        );
        if let Err(error) = fs::copy(&ready_made, embedded) {
            eprintln!(
                "{READY_MADE} names {}, which cannot be read ({error}). Give an absolute path.",
                Path::new(&ready_made).display()
            );
            exit(1);
        }
        return Ok(());
    }

    require_target()?;
    let workspace = Path::new(&env::var("CARGO_MANIFEST_DIR")?)
        .join("..")
        .canonicalize()?;
    let target_dir = out.join("guest");
    build_guest(&workspace, &target_dir)?;
    let built = target_dir.join(TARGET).join("guest");
    rerun_if_sources_change(&workspace, &built.join("statehouse_guest.d"))?;

    let module = fs::read(built.join("statehouse_guest.wasm"))?;
    let component = wit_component::ComponentEncoder::default()
        .module(&module)?
        .validate(true)
        .encode()?;
    // Untouched where nothing changed, so that the crate is not built anew for nothing.
    if fs::read(&embedded).ok().as_deref() != Some(&component) {
        fs::write(&embedded, component)?;
    }
    Ok(())
}

/// The sources that `policy new` gives authors: a list of their names and texts, which the library embeds.
fn list_sources(out: &Path) -> Result<(), Box<dyn Error>> {
    let workspace = Path::new(&env::var("CARGO_MANIFEST_DIR")?)
        .join("..")
        .canonicalize()?;
    let mut list = String::from("&[\n");
    for (from, to) in [
        ("guest/sdk/src", "vendor/statehouse-policy/src"),
        ("guest/src", "vendor/statehouse-guest/src"),
    ] {
        let from = workspace.join(from);
        println!("cargo::rerun-if-changed={}", from.display());
        let mut files = Vec::new();
        sources(&from, &mut files)?;
        files.sort();
        for file in files {
            let to = Path::new(to).join(file.strip_prefix(&from)?);
            list.push_str(&format!("({to:?}, include_str!({file:?})),\n"));
        }
    }
    list.push_str("]\n");
    fs::write(out.join("sources.rs"), list)?;
    Ok(())
}

fn sources(directory: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, files)?;
        } else if path.extension().is_some_and(|it| it == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Without the target the nested build would fail with an error about the `core` crate, which helps nobody.
fn require_target() -> Result<(), Box<dyn Error>> {
    let rustc = env::var("RUSTC")?;
    let output = Command::new(rustc)
        .args(["--print", "target-libdir", "--target", TARGET])
        .output()?;
    let directory = PathBuf::from(String::from_utf8(output.stdout)?.trim());
    let installed = fs::read_dir(directory).is_ok_and(|mut files| {
        files
            .any(|file| file.is_ok_and(|f| f.file_name().to_string_lossy().starts_with("libcore-")))
    });
    if !installed {
        eprintln!(
            "The standard policy is WebAssembly, and this compiler cannot build for {TARGET} yet.\n\
             Do one of these:\n\
             * rustup toolchain install              (in this directory; reads rust-toolchain.toml)\n\
             * rustup target add {TARGET}\n\
             * {READY_MADE}=FILE cargo build ...     (a component that was built elsewhere)"
        );
        exit(1);
    }
    Ok(())
}

/// Cargo in cargo, in a target directory of its own: the outer one is locked by the outer build.
fn build_guest(workspace: &Path, target_dir: &Path) -> Result<(), Box<dyn Error>> {
    let mut cargo = Command::new(env::var("CARGO")?);
    cargo
        .current_dir(workspace)
        .args([
            "build",
            "--package",
            "statehouse-guest",
            "--lib",
            "--profile",
            "guest",
        ])
        .args(["--target", TARGET, "--locked", "--target-dir"])
        .arg(target_dir);
    // What is meant for the host (coverage, sanitizers, clippy's wrapper) must not leak into the guest.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        let leaks = [
            "CARGO_ENCODED_RUSTFLAGS",
            "RUSTFLAGS",
            "RUSTC",
            "RUSTDOC",
            "CARGO_TARGET_DIR",
        ]
        .contains(&&*name)
            || name.starts_with("RUSTC_")
            || name.starts_with("CARGO_BUILD_")
            || name.starts_with("CARGO_PROFILE_")
            || name.starts_with("CARGO_FEATURE_")
            || name.starts_with("CARGO_CFG_")
            || name.starts_with("CLIPPY_");
        if leaks {
            cargo.env_remove(&*name);
        }
    }
    if !cargo.status()?.success() {
        eprintln!("The standard policy did not build; what cargo said of it stands above.");
        exit(1);
    }
    Ok(())
}

/// Cargo's dep-info names every source file of the guest; the manifests and the contract are not in it.
fn rerun_if_sources_change(workspace: &Path, dep_info: &Path) -> Result<(), Box<dyn Error>> {
    for path in [
        "Cargo.lock",
        "Cargo.toml",
        "guest/Cargo.toml",
        "guest/sdk/Cargo.toml",
        "wit",
    ] {
        println!("cargo::rerun-if-changed={}", workspace.join(path).display());
    }
    let dep_info = fs::read_to_string(dep_info)?;
    let sources = dep_info.split_once(": ").map_or("", |(_, sources)| sources);
    // A space in a path is escaped in dep-info.
    for source in sources.replace("\\ ", "\0").split_whitespace() {
        println!("cargo::rerun-if-changed={}", source.replace('\0', " "));
    }
    Ok(())
}
