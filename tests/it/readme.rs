//! Two READMEs, one guide: `README.zh-CN.md` says in Chinese what `README.md` says, section by section, and every
//! link of both leads somewhere.
//!
//! Whoever changes one of them finds here which section of the other has fallen behind.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::Path,
};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

const ENGLISH: &str = "README.md";
const CHINESE: &str = "README.zh-CN.md";

/// What stands under a heading and is the same in every language.
#[derive(Debug, Default)]
struct Section {
    level: usize,
    paragraphs: usize,
    items: usize,
    strong: usize,
    /// With what the fence says.
    code: Vec<String>,
    /// The cells of every row.
    tables: Vec<Vec<usize>>,
    /// Where links lead: files and addresses as they are written, headings by their number.
    links: Vec<String>,
}

#[derive(Debug, Default)]
struct Page {
    titles: Vec<String>,
    anchors: Vec<String>,
    sections: Vec<Section>,
    /// References in brackets that nothing defines: GitHub shows the brackets.
    undefined: Vec<String>,
}

fn text(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

/// As GitHub makes an anchor of a heading: letters and digits of any script, hyphens for spaces. rustdoc does the
/// same.
fn anchor(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

impl Page {
    fn read(name: &str) -> Self {
        let markdown = text(name);
        let mut page = Self::default();
        let mut undefined = Vec::new();
        let mut broken = |link: pulldown_cmark::BrokenLink<'_>| {
            undefined.push(link.reference.to_string());
            None
        };
        let mut events =
            Parser::new_with_broken_link_callback(&markdown, Options::ENABLE_TABLES, Some(&mut broken)).peekable();
        while let Some(event) = events.next() {
            match event {
                Event::Start(Tag::Heading { level, .. }) => {
                    let mut title = String::new();
                    while let Some(event) = events.next_if(|event| !matches!(event, Event::End(TagEnd::Heading(_)))) {
                        if let Event::Text(text) | Event::Code(text) = event {
                            title.push_str(&text);
                        }
                    }
                    page.anchors.push(anchor(&title));
                    page.titles.push(title);
                    page.sections.push(Section { level: level as usize, ..Section::default() });
                }
                Event::Start(Tag::CodeBlock(kind)) => {
                    let mut code = format!("{kind:?}\n");
                    while let Some(Event::Text(text)) = events.next_if(|event| matches!(event, Event::Text(_))) {
                        code.push_str(&text);
                    }
                    page.here().code.push(code);
                }
                Event::Start(Tag::Paragraph) => page.here().paragraphs += 1,
                Event::Start(Tag::Item) => page.here().items += 1,
                Event::Start(Tag::Strong) => page.here().strong += 1,
                Event::Start(Tag::Table(_)) => page.here().tables.push(Vec::new()),
                Event::Start(Tag::TableHead | Tag::TableRow) => page.here().tables.last_mut().unwrap().push(0),
                Event::Start(Tag::TableCell) => {
                    *page.here().tables.last_mut().unwrap().last_mut().unwrap() += 1;
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.here().links.push(dest_url.to_string());
                }
                _ => {}
            }
        }
        page.undefined = undefined;
        page
    }

    fn here(&mut self) -> &mut Section {
        self.sections.last_mut().expect("it begins with a heading")
    }

    fn links(&self) -> impl Iterator<Item = &str> {
        self.sections.iter().flat_map(|section| &section.links).map(String::as_str)
    }

    /// The sections, with the links in an order that does not depend on the language.
    fn comparable(self) -> Vec<Section> {
        let number: HashMap<_, _> = self.anchors.iter().enumerate().map(|(n, anchor)| (anchor.clone(), n)).collect();
        let mut sections = self.sections;
        for section in &mut sections {
            for link in &mut section.links {
                if let Some(n) = link.strip_prefix('#').and_then(|anchor| number.get(anchor)) {
                    *link = format!("heading {n}");
                } else if [ENGLISH, CHINESE].contains(&link.as_str()) {
                    *link = "the other README".to_owned();
                }
            }
            section.links.sort_unstable();
        }
        sections
    }
}

#[test]
fn both_readmes_say_the_same_section_by_section() {
    let (english, chinese) = (Page::read(ENGLISH), Page::read(CHINESE));
    let titles: Vec<_> = english.titles.iter().cloned().zip(chinese.titles.iter().cloned()).collect();
    let place = |n: usize| format!("section {n}, {ENGLISH} {:?}, {CHINESE} {:?}", titles[n].0, titles[n].1);
    let number = |page: &Page| page.titles.len();
    let (in_english, in_chinese) = (number(&english), number(&chinese));
    assert!(in_english > 30, "{titles:?}");
    let (english, chinese) = (english.comparable(), chinese.comparable());
    let pairs = || english.iter().zip(&chinese).enumerate();

    // What differs is shown, and not the whole section. Where one page has a heading more, it is here or a little
    // above.
    for (n, (one, other)) in pairs() {
        let what = |what: &str| format!("{}: {what} (headings: {in_english} and {in_chinese})", place(n));
        assert_eq!(one.level, other.level, "{}", what("the level of the heading"));
        assert_eq!(one.code.len(), other.code.len(), "{}", what("the number of blocks of code"));
        if let Some((one, other)) = one.code.iter().zip(&other.code).find(|(one, other)| one != other) {
            let differing = one.lines().zip(other.lines()).find(|(one, other)| one != other);
            panic!("{}: {differing:?}", what("the code is not the same, byte for byte"));
        }
        assert_eq!(one.tables, other.tables, "{}", what("the rows of the tables, and the cells of each"));
        let blocks = |section: &Section| (section.paragraphs, section.items, section.strong);
        assert_eq!(blocks(one), blocks(other), "{}", what("paragraphs, items of lists, words in bold"));
    }
    assert_eq!(in_english, in_chinese, "the number of headings");
    for (n, (one, other)) in pairs() {
        assert_eq!(one.links, other.links, "{}: where the links lead", place(n));
    }
}

#[test]
fn every_link_of_the_readmes_leads_somewhere() {
    for name in [ENGLISH, CHINESE] {
        let page = Page::read(name);
        let unique: HashSet<_> = page.anchors.iter().collect();
        assert_eq!(unique.len(), page.anchors.len(), "two headings of {name} have one anchor: {:?}", page.anchors);
        assert!(page.undefined.is_empty(), "{name}: nothing defines {:?}", page.undefined);
        let lost: Vec<_> = page
            .links()
            .filter(|link| !link.starts_with("https://"))
            .filter(|link| match link.strip_prefix('#') {
                Some(anchor) => !page.anchors.iter().any(|known| known == anchor),
                None => !Path::new(env!("CARGO_MANIFEST_DIR")).join(link).exists(),
            })
            .collect();
        assert!(lost.is_empty(), "links of {name} that lead nowhere: {lost:?}");
        assert!(page.links().count() > 50, "{name}");
    }
}

/// What is for those who change the crate is found under its chapter.
const CHAPTERS_FOR_CONTRIBUTORS: [&str; 4] = ["Working on this crate", "Changes", "参与开发", "变更记录"];

#[test]
fn the_contents_of_the_readmes_name_every_section() {
    for name in [ENGLISH, CHINESE] {
        let page = Page::read(name);
        let mut chapter = "";
        let mut missing = Vec::new();
        for (n, title) in page.titles.iter().enumerate().skip(1) {
            let is_chapter = page.sections[n].level == 2;
            if is_chapter {
                chapter = title;
            }
            let is_named = page.sections[0].links.contains(&format!("#{}", page.anchors[n]));
            if !is_named && (is_chapter || !CHAPTERS_FOR_CONTRIBUTORS.contains(&chapter)) {
                missing.push(title);
            }
        }
        assert!(missing.is_empty(), "the contents at the beginning of {name} have no link to {missing:?}");
    }
}
