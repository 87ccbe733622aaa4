(* Quadratics f x = x^T A x / 2: they meet the hypotheses of the descent theorems, and on them T1 is exact. *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum Vectors Blocks BlockDescent.
Open Scope R_scope.

Definition mv (n : nat) (A : nat -> nat -> R) (x : vec) : vec := fun i => psum (fun j => A i j * x j) n.
Definition quad (n : nat) (A : nat -> nat -> R) (x : vec) : R := dot n x (mv n A x) / 2.

Lemma mv_axpy n A x a y : mv n A (axpy x a y) = axpy (mv n A x) a (mv n A y).
Proof.
  apply functional_extensionality. intros i. unfold mv, axpy.
  rewrite <- psum_scal, <- psum_plus. apply psum_ext. intros; ring.
Qed.

Lemma mv_symmetric n A x y : (forall i j, A i j = A j i) -> dot n x (mv n A y) = dot n y (mv n A x).
Proof.
  intros HA. unfold dot, mv.
  rewrite (psum_ext _ (fun i => psum (fun j => x i * (A i j * y j)) n)) by (intros; rewrite psum_scal; reflexivity).
  rewrite psum_exchange. apply psum_ext. intros j _. rewrite <- psum_scal. apply psum_ext.
  intros i _. rewrite (HA i j). ring.
Qed.

Lemma quad_axpy n A x a y : (forall i j, A i j = A j i) ->
  quad n A (axpy x a y) = quad n A x + a * dot n (mv n A x) y + a ^ 2 * quad n A y.
Proof.
  intros HA. unfold quad. rewrite mv_axpy, dot_axpy_r.
  rewrite (dot_comm n (axpy x a y)), dot_axpy_r, (dot_comm n (axpy x a y)), dot_axpy_r.
  rewrite (dot_comm n (mv n A y) x), (mv_symmetric n A x y HA), (dot_comm n (mv n A y) y).
  rewrite (dot_comm n (mv n A x) x), (dot_comm n y (mv n A x)). field.
Qed.

Theorem quad_gradient n A : (forall i j, A i j = A j i) -> is_gradient n (quad n A) (mv n A).
Proof.
  intros HA x v t.
  apply (is_derive_ext (fun s => quad n A x + s * dot n (mv n A x) v + s ^ 2 * quad n A v));
    [intros s; symmetry; apply quad_axpy, HA|].
  rewrite mv_axpy, (dot_comm n (axpy _ _ _)), dot_axpy_r, (dot_comm n v (mv n A x)).
  replace (dot n v (mv n A v)) with (2 * quad n A v) by (unfold quad; field).
  auto_derive; [exact I|ring].
Qed.

Lemma mv_vsub n A x y : vsub (mv n A x) (mv n A y) = mv n A (vsub x y).
Proof.
  apply functional_extensionality. intros i. unfold vsub, mv.
  replace (psum (fun j => A i j * x j) n - psum (fun j => A i j * y j) n)
    with (psum (fun j => A i j * x j) n + (-1) * psum (fun j => A i j * y j) n) by ring.
  rewrite <- psum_scal, <- psum_plus. apply psum_ext. intros; ring.
Qed.

(* the Frobenius norm is a Lipschitz constant *)
Definition frobenius (n : nat) (A : nat -> nat -> R) : R := sqrt (psum (fun i => psum (fun j => A i j ^ 2) n) n).

Theorem quad_lipschitz n A : lipschitz n (mv n A) (frobenius n A).
Proof.
  intros x y. rewrite mv_vsub. set (v := vsub x y). set (F := psum (fun i => psum (fun j => A i j ^ 2) n) n).
  assert (F0 : 0 <= F) by (apply psum_nonneg; intros; apply psum_nonneg; intros; apply pow2_ge_0).
  apply nrm_le_of_sq; [apply Rmult_le_pos; [apply sqrt_pos|apply nrm_nonneg]|].
  rewrite Rpow_mult_distr, nrm_sq. unfold frobenius. fold F. rewrite pow2_sqrt by exact F0.
  unfold F. rewrite Rmult_comm, <- psum_scal. unfold dot at 1. apply psum_le. intros i _.
  pose proof (cauchy_schwarz_sq n (A i) v) as C. unfold mv.
  rewrite (psum_ext (fun j => A i j ^ 2) (fun j => A i j * A i j)) by (intros; ring).
  fold (dot n (A i) v) (dot n (A i) (A i)). lra.
Qed.

(* blocks of one coordinate: the block constant is the diagonal entry *)
Theorem quad_block_lipschitz n A : (forall i, 0 <= A i i) ->
  block_lipschitz n (fun j => j) (mv n A) (fun i => A i i).
Proof.
  intros HA i x d. rewrite mv_vsub.
  replace (vsub (axpy x 1 (proj (fun j => j) i d)) x) with (proj (fun j => j) i d)
    by (apply functional_extensionality; intros; unfold vsub, axpy; ring).
  apply nrm_le_of_sq; [apply Rmult_le_pos; [apply HA|apply nrm_nonneg]|].
  rewrite Rpow_mult_distr, nrm_sq. unfold dot at 2. rewrite <- psum_scal. unfold dot. apply psum_le. intros j Hj.
  enough (E : proj (fun k => k) i (mv n A (proj (fun k => k) i d)) j = A i i * proj (fun k => k) i d j)
    by (rewrite E; right; ring).
  unfold proj at 1 3. destruct (Nat.eqb_spec j i) as [->|_]; [|ring].
  unfold mv. rewrite (psum_one _ n i Hj); [unfold proj; rewrite Nat.eqb_refl; ring|].
  intros k _ Hk. unfold proj. destruct (Nat.eqb_spec k i); [contradiction|ring].
Qed.

(* T1 on a quadratic is an equality: along an eigenvector of the block, and so always for one coordinate,
   the step decreases f exactly when 0 < eta < 2/L_i. *)
Theorem quad_block_exact : forall n blk A i x eta Li, (forall i j, A i j = A j i) -> 0 < Li ->
  let g := proj blk i (mv n A x) in
  proj blk i (mv n A g) = (fun j => Li * g j) ->
  quad n A (axpy x (- eta) g) = quad n A x - eta * (1 - eta * Li / 2) * nrm n g ^ 2 /\
  (0 < nrm n g -> (quad n A (axpy x (- eta) g) < quad n A x <-> 0 < eta < 2 / Li)).
Proof.
  intros n blk A i x eta Li HA HL g HE.
  assert (E : quad n A (axpy x (- eta) g) = quad n A x - eta * (1 - eta * Li / 2) * nrm n g ^ 2).
  { rewrite quad_axpy by exact HA. rewrite nrm_sq.
    replace (dot n (mv n A x) g) with (dot n g g) by (symmetry; apply dot_proj_r).
    replace (quad n A g) with (Li * dot n g g / 2); [field|].
    assert (G : dot n g (mv n A g) = dot n g (proj blk i (mv n A g))) by apply dot_proj.
    unfold quad. f_equal. rewrite G, HE. unfold dot. rewrite <- psum_scal. apply psum_ext. intros; ring. }
  split; [exact E|]. intros Hg. rewrite E. pose proof (pow_lt _ 2 Hg) as P.
  assert (D : forall u, 0 < u * nrm n g ^ 2 <-> 0 < u) by (intros u; split; intros; nra).
  assert (K : eta < 2 / Li <-> eta * Li < 2).
  { split; intros H.
    - apply (Rmult_lt_compat_r _ _ _ HL) in H. replace (2 / Li * Li) with 2 in H by (field; lra). exact H.
    - apply Rmult_lt_reg_r with Li; [exact HL|]. replace (2 / Li * Li) with 2 by (field; lra). exact H. }
  rewrite K. split; intros H.
  - assert (Q : 0 < eta * (1 - eta * Li / 2)) by (apply D; lra). split; nra.
  - assert (Q : 0 < eta * (1 - eta * Li / 2)) by (apply Rmult_lt_0_compat; lra). apply D in Q. lra.
Qed.
