//! Lists the sources that the library embeds and `policy new` writes into new projects.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let workspace = Path::new(&env::var("CARGO_MANIFEST_DIR")?)
        .join("../..")
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
