(* T11: a fixed perturbation E of the base moves the top curvature by at most its size (Weyl), at the same point. *)
From Coq Require Import Reals Lra Psatz.
From LCSB Require Import FinSum Vectors Quadratic.
Open Scope R_scope.

(* l is the largest value of v^T H v over unit v, and is taken *)
Definition top_curvature (n : nat) (H : nat -> nat -> R) (l : R) : Prop :=
  (forall v, dot n v (mv n H v) <= l * nrm n v ^ 2) /\
  exists v, 0 < nrm n v /\ dot n v (mv n H v) = l * nrm n v ^ 2.

Theorem weyl : forall n H E l l' e, top_curvature n H l ->
  top_curvature n (fun i j => H i j + E i j) l' ->
  (forall v, Rabs (dot n v (mv n E v)) <= e * nrm n v ^ 2) -> Rabs (l' - l) <= e.
Proof.
  intros n H E l l' e [U [v [Nv Ev]]] [U' [w [Nw Ew]]] B.
  assert (S : forall z, dot n z (mv n (fun i j => H i j + E i j) z) = dot n z (mv n H z) + dot n z (mv n E z)).
  { intros z. unfold dot. rewrite <- psum_plus. apply psum_ext. intros i _. unfold mv.
    rewrite <- Rmult_plus_distr_l, <- psum_plus. f_equal. apply psum_ext. intros; ring. }
  pose proof (pow_lt _ 2 Nv) as Pv. pose proof (pow_lt _ 2 Nw) as Pw.
  pose proof (U w) as Uw. pose proof (U' v) as Uv. rewrite S in Uv, Ew.
  pose proof (B w) as Bw. pose proof (B v) as Bv.
  pose proof (Rle_abs (dot n w (mv n E w))). pose proof (Rle_abs (- dot n v (mv n E v))) as A.
  rewrite Rabs_Ropp in A. apply Rabs_le. split; nra.
Qed.
