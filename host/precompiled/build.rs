//! Builds the standard policy in `guest/` for wasm32-unknown-unknown, converts it to a component
//! and, with the feature `embedded-code`, compiles that to machine code. The library embeds the
//! files from OUT_DIR. A plain `cargo build` or `cargo run` picks up every change of the guest's
//! sources.
//!
//! With `STATEHOUSE_POLICY_COMPONENT=FILE` the build uses a component that was built elsewhere, for
//! packagers and for machines without the target.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::{env, fs};

#[cfg(feature = "embedded-code")]
#[path = "src/build/code.rs"]
mod code;
#[path = "src/build/imports.rs"]
mod imports;

const TARGET: &str = "wasm32-unknown-unknown";
const READY_MADE: &str = "STATEHOUSE_POLICY_COMPONENT";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={READY_MADE}");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let component = component(&out)?;
    // Unchanged files are not written, so that the crate is not rebuilt needlessly.
    let write = |name: &str, bytes: &[u8]| {
        let path = out.join(name);
        match fs::read(&path) {
            Ok(before) if before == bytes => Ok(()),
            _ => fs::write(path, bytes),
        }
    };
    write("standard.wasm", &component)?;
    #[cfg(feature = "embedded-code")]
    write("standard.code", &code::compile(&component)?)?;
    let ready_made = env::var_os(READY_MADE).is_some();
    let ruled = if ready_made {
        Vec::new()
    } else {
        guest(&out, "statehouse-ruled")?
    };
    write("ruled.wasm", &ruled)?;
    write(
        "imports.wasm",
        &imports::prefix(&workspace()?.join("wit/policy.wit"))?,
    )?;
    Ok(())
}

fn component(out: &Path) -> Result<Vec<u8>, Box<dyn Error>> {
    if let Some(ready_made) = env::var_os(READY_MADE) {
        println!(
            "cargo::rerun-if-changed={}",
            Path::new(&ready_made).display()
        );
        return Ok(fs::read(&ready_made).unwrap_or_else(|error| {
            eprintln!(
                "{READY_MADE} names {}, which cannot be read ({error}). Give an absolute path.",
                Path::new(&ready_made).display()
            );
            exit(1);
        }));
    }

    require_target()?;
    guest(out, "statehouse-guest")
}

fn workspace() -> Result<PathBuf, Box<dyn Error>> {
    let manifest = env::var("CARGO_MANIFEST_DIR")?;
    Ok(Path::new(&manifest).join("../..").canonicalize()?)
}

/// Builds a package of the workspace as a component.
fn guest(out: &Path, package: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let workspace = workspace()?;
    let target_dir = out.join("guest");
    build_guest(&workspace, &target_dir, package)?;
    let built = target_dir.join(TARGET).join("guest");
    let name = package.replace('-', "_");
    rerun_if_sources_change(&workspace, &built.join(format!("{name}.d")))?;

    let module = fs::read(built.join(format!("{name}.wasm")))?;
    let component = wit_component::ComponentEncoder::default()
        .module(&module)?
        .validate(true)
        .encode()?;
    Ok(component)
}

/// Checks that the target is installed. Without it the nested build would fail with a misleading
/// error about the `core` crate.
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

/// Runs cargo within cargo, in a separate target directory because the outer build locks its own.
fn build_guest(workspace: &Path, target_dir: &Path, package: &str) -> Result<(), Box<dyn Error>> {
    let mut cargo = Command::new(env::var("CARGO")?);
    cargo
        .current_dir(workspace)
        .args(["build", "--package", package, "--lib", "--profile", "guest"])
        .args(["--target", TARGET, "--locked", "--target-dir"])
        .arg(target_dir);
    // Settings for the host (coverage, sanitizers, clippy's wrapper) must not affect the guest.
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
        eprintln!("The standard policy did not build; see the messages of cargo above.");
        exit(1);
    }
    Ok(())
}

/// Registers the inputs of the guest. Cargo's dep-info lists its source files, but not the
/// manifests and the WIT contract.
fn rerun_if_sources_change(workspace: &Path, dep_info: &Path) -> Result<(), Box<dyn Error>> {
    for path in [
        "Cargo.lock",
        "Cargo.toml",
        "guest/Cargo.toml",
        "guest/sdk/Cargo.toml",
        "guest/ruled/Cargo.toml",
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
