//! The beginning of a composed policy: the imports of the contract with their types.
//!
//! wit-component writes types and imports before everything else. So the beginning of a component
//! of the world `policy`, up to its first core module, declares the imports.

use std::error::Error;
use std::fs;
use std::path::Path;

use wasm_encoder::{
    CodeSection, EntityType, ExportKind, ExportSection, Function, FunctionSection, ImportSection,
    MemorySection, MemoryType, Module, TypeSection, ValType,
};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::abi::{AbiVariant, WasmType};
use wit_parser::{IndexMap, Resolve, WorldId, WorldItem, WorldKey};

/// The length of the header of a component, and the id of a section with a core module (component
/// model binary format).
const HEADER: usize = 8;
const CORE_MODULE: u8 = 1;

/// The first sections of a component of the world `policy`.
pub(crate) fn prefix(wit: &Path) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut resolve = Resolve::default();
    let package = resolve.push_str(wit, &fs::read_to_string(wit)?)?;
    let world = resolve.select_world(&[package], Some("policy"))?;
    let mut module = module(&resolve, world);
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)?;
    let component = ComponentEncoder::default().module(&module)?.encode()?;
    let mut at = HEADER;
    while component.get(at).is_some_and(|id| *id != CORE_MODULE) {
        let (len, bytes) = leb(&component[at + 1..]);
        at += 1 + bytes + len;
    }
    Ok(component[..at.min(component.len())].to_vec())
}

/// A number in LEB128, and how many bytes it has.
fn leb(bytes: &[u8]) -> (usize, usize) {
    let mut number = 0;
    for (at, byte) in bytes.iter().enumerate() {
        number |= usize::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return (number, at + 1);
        }
    }
    (number, bytes.len())
}

/// A core module that imports and exports all functions of the world, and does nothing. The exports
/// matter because only types that a function needs are imported.
fn module(resolve: &Resolve, world: WorldId) -> Vec<u8> {
    let world = &resolve.worlds[world];
    let (mut types, mut imports) = (TypeSection::new(), ImportSection::new());
    for (interface, function) in functions(resolve, &world.imports) {
        let number = add_type(&mut types, resolve, AbiVariant::GuestImport, function);
        imports.import(&interface, &function.name, EntityType::Function(number));
    }
    let (mut functions_of_it, mut exports) = (FunctionSection::new(), ExportSection::new());
    let mut code = CodeSection::new();
    let mut add = |name: &str, number: u32| {
        let index = imports.len() + functions_of_it.len();
        functions_of_it.function(number);
        exports.export(name, ExportKind::Func, index);
        let mut body = Function::new([]);
        body.instructions().unreachable().end();
        code.function(&body);
    };
    for (interface, function) in functions(resolve, &world.exports) {
        let number = add_type(&mut types, resolve, AbiVariant::GuestExport, function);
        add(&format!("{interface}#{}", function.name), number);
    }
    types.ty().function([ValType::I32; 4], [ValType::I32]);
    add("cabi_realloc", types.len() - 1);
    let mut memories = MemorySection::new();
    memories.memory(MemoryType {
        minimum: 0,
        maximum: None,
        memory64: false,
        shared: false,
        page_size_log2: None,
    });
    exports.export("memory", ExportKind::Memory, 0);
    let mut module = Module::new();
    module
        .section(&types)
        .section(&imports)
        .section(&functions_of_it)
        .section(&memories)
        .section(&exports)
        .section(&code);
    module.finish()
}

/// The functions of interfaces, with the names of their interfaces.
fn functions<'a>(
    resolve: &'a Resolve,
    items: &'a IndexMap<WorldKey, WorldItem>,
) -> impl Iterator<Item = (String, &'a wit_parser::Function)> {
    items.iter().flat_map(|(key, item)| {
        let interface = match item {
            WorldItem::Interface { id, .. } => Some(&resolve.interfaces[*id]),
            _ => None,
        };
        let functions = interface.into_iter().flat_map(|it| it.functions.values());
        functions.map(|function| (resolve.name_world_key(key), function))
    })
}

/// Adds the core type of a function, and returns its number.
fn add_type(
    types: &mut TypeSection,
    resolve: &Resolve,
    variant: AbiVariant,
    function: &wit_parser::Function,
) -> u32 {
    let signature = resolve.wasm_signature(variant, function);
    let core = |it: &WasmType| match it {
        WasmType::I64 | WasmType::PointerOrI64 => ValType::I64,
        WasmType::F32 => ValType::F32,
        WasmType::F64 => ValType::F64,
        WasmType::I32 | WasmType::Pointer | WasmType::Length => ValType::I32,
    };
    let (params, results) = (&signature.params, &signature.results);
    types
        .ty()
        .function(params.iter().map(core), results.iter().map(core));
    types.len() - 1
}
